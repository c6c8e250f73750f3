// Node.js with blocks of a known size, which its buffers take from malloc(): keep() is called by order(), that by
// serve().
//
// usage: node runtime.js COUNT BYTES
'use strict';
const [count, bytes] = process.argv.slice(2).map(Number);
const kept = [];

function keep() { kept.push(Buffer.allocUnsafeSlow(bytes)); }
function order() { keep(); return kept.length; }
function serve() { while (order() < count); }

process.stdin.once('data', () => {
	serve();
	process.stdin.once('data', () => process.exit());
	console.log(`done blocks=${kept.length}`);
});
console.log(`ready ${process.pid}`);
