// Node.js, with an array of objects that grows every 10 ms, after the first line and until there is another.
//
// The protocol is that of workload.h.
'use strict';
const kept = [];

function grow() {
	for (let i = 0; i < 300; i++)
		kept.push({ number: kept.length, text: `number ${kept.length}` });
}

process.stdin.once('data', () => {
	const timer = setInterval(grow, 10);
	process.stdin.once('data', () => {
		clearInterval(timer);
		process.stdin.once('data', () => process.exit());
		console.log('done');
	});
});
console.log(`ready ${process.pid}`);
