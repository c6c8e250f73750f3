//! Clients that hang, that are many, that send wrong requests, and that have no permission.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;

use super::{Answer, Serving};
use crate::export::{rows, sum};
use crate::harness::{self, Tool, Workload};
use crate::serve::other_machines_are_kept_out;

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "serve":
        clients_that_hang_delay_nobody [Once],
        a_hundred_clients_are_one_report_a_second [Once],
        a_socket_is_for_its_owner_and_goes [Once],
        wrong_requests_are_refused [Once],
        pages_of_the_web_are_kept_out [Once],
        an_address_in_use_is_told_before_the_trace [Once],
        other_machines_are_kept_out [Once],
        the_end_waits_for_no_client [Once],
    }
}

fn clients_that_hang_delay_nobody() -> Result<()> {
    let mut program = Workload::start("alloc", &["one", "malloc", "1009", "37"])?;
    let mut serving = Serving::start(&["-p", &program.pid(), "-o", "0", "-j", "0.1"])?;
    // Some clients send nothing, some never end their request, and some never read.
    let mut hanging = Vec::new();
    for client in 0..50 {
        let mut stream = serving.connect()?;
        let said = [
            "",
            "GET / HTTP/1.1\r\nHost: x",
            "GET /flame.svg HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ];
        stream.write_all(said[client % 3].as_bytes())?;
        hanging.push(stream);
    }
    let begun = Instant::now();
    program.work()?;
    for _ in 0..10 {
        serving.tool.wait_for_output("\"type\":\"report\"")?;
    }
    ensure!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
    ensure!(serving.get("/metrics")?.status == 200);
    ensure!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
    drop(hanging);
    let ended = serving.interrupt()?;
    let reports = rows(&ended, "report")?;
    let last = reports.last().context("no report")?;
    ensure!(
        last["allocations"] == 1009 && last["bytes"] == 1009 * 37,
        "{last}"
    );
    Ok(())
}

fn a_hundred_clients_are_one_report_a_second() -> Result<()> {
    let mut program = Workload::start("alloc", &["one", "malloc", "1009", "37"])?;
    let args = ["-v", "-p", &program.pid(), "-o", "0", "-j", "600"];
    let serving = Serving::start(&args)?;
    let begun = Instant::now();
    let site = &serving.site;
    let answers: Vec<Answer> = thread::scope(|scope| {
        let get = |_| scope.spawn(|| site.get("/debug/pprof/heap"));
        let clients: Vec<_> = (0..100).map(get).collect();
        program.work()?;
        let answers = clients.into_iter().map(|client| {
            let answer = client.join().map_err(|_| anyhow::anyhow!("it panicked"))?;
            answer.context("no answer")
        });
        answers.collect::<Result<_>>()
    })?;
    let took = begun.elapsed();
    for answer in &answers {
        ensure!(answer.status == 200, "{answer:?}");
    }
    let ended = serving.interrupt()?;
    // Each reading of the blocks prints a message. The last one is for the report at the end.
    let looks = ended.stderr.matches(" blocks read in ").count() as u64;
    ensure!(
        (2..=took.as_secs() + 2).contains(&looks),
        "{looks} looks in {took:?}: {ended:?}"
    );
    let reports = rows(&ended, "report")?;
    ensure!(
        sum(&reports, "allocations") == 1009 && sum(&reports, "bytes") == 1009 * 37,
        "{reports:?}"
    );
    Ok(())
}

fn a_socket_is_for_its_owner_and_goes() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("memleak.sock");
    let name = path.to_str().context("not UTF-8")?;
    let program = Workload::start("alloc", &["hold"])?;
    let serve = format!("unix:{name}");
    let args = ["-p", &program.pid(), "--serve", &serve, "600"];
    for end in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGKILL,
        Signal::SIGTERM,
    ] {
        let mut tool = Tool::start("memleak", &args)?;
        tool.wait_for_stderr("probes in")?;
        let mode = fs::symlink_metadata(&path)?.permissions().mode();
        ensure!(mode & 0o777 == 0o600, "{mode:o}");
        let mut curl = Command::new("curl");
        let curl = curl.args(["-sSf", "--unix-socket", name, "http://any.name/metrics"]);
        let curl = curl.output().context("no curl")?;
        ensure!(
            curl.status.success() && curl.stdout.ends_with(b"# EOF\n"),
            "{curl:?}"
        );

        let second = harness::run("memleak", &args)?;
        ensure!(second.status.code() == Some(1), "{second:?}");
        ensure!(
            second.stderr.contains("another program serves there"),
            "{second:?}"
        );
        tool.signal(end)?;
        let ended = tool.wait()?;
        // A memleak that is killed leaves its socket, which the next one replaces.
        let killed = end == Signal::SIGKILL;
        ensure!(ended.status.success() != killed, "{ended:?}");
        ensure!(path.exists() == killed, "{end}: there is {}", path.exists());
    }
    fs::write(&path, "mine")?;
    let refused = harness::run("memleak", &args)?;
    ensure!(refused.status.code() == Some(1), "{refused:?}");
    ensure!(fs::read_to_string(&path)? == "mine");
    Ok(())
}

fn wrong_requests_are_refused() -> Result<()> {
    let program = Workload::start("alloc", &["hold"])?;
    let serving = Serving::start(&["-p", &program.pid(), "600"])?;
    let host = "Host: localhost\r\n";
    let large = "x".repeat(9000);
    for (request, status) in [
        (format!("GET / HTTP/1.1\r\n{host}\r\n"), 200),
        (format!("HEAD / HTTP/1.1\r\n{host}\r\n"), 200),
        (format!("GET /debug/pprof/ HTTP/1.1\r\n{host}\r\n"), 200),
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), 400),
        (format!("{large}\r\n\r\n"), 431),
        (format!("GET /{large} HTTP/1.1\r\n{host}\r\n"), 431),
        (format!("GET / HTTP/1.1\r\n{host}X: {large}\r\n\r\n"), 431),
        ("\u{16}\u{3}\u{1}\r\n\r\n".to_owned(), 400),
        (
            format!("POST / HTTP/1.1\r\n{host}Content-Length: 0\r\n\r\n"),
            405,
        ),
        (format!("GET /../etc/passwd HTTP/1.1\r\n{host}\r\n"), 404),
        (
            format!("GET /debug/pprof/goroutine HTTP/1.1\r\n{host}\r\n"),
            404,
        ),
        (
            format!("GET /debug/pprof/heap?seconds=0 HTTP/1.1\r\n{host}\r\n"),
            400,
        ),
        (
            format!("GET /debug/pprof/heap?seconds=61 HTTP/1.1\r\n{host}\r\n"),
            400,
        ),
        (
            format!("GET /debug/pprof/heap?debug=1&seconds=1 HTTP/1.1\r\n{host}\r\n"),
            400,
        ),
    ] {
        let answer = serving.ask(request.as_bytes())?;
        ensure!(answer.status == status, "{request:.60}: {answer:?}");
        let is_empty = answer.body.is_empty();
        ensure!(
            is_empty == request.starts_with("HEAD"),
            "{request:.60}: {answer:?}"
        );
    }
    let unknown = serving.get("/debug/pprof/goroutine")?;
    ensure!(unknown.header("x-go-pprof") == "1", "{unknown:?}");
    // The client sends one byte at a time, and never the last one.
    let mut slow = serving.connect()?;
    let begun = Instant::now();
    for byte in format!("GET / HTTP/1.1\r\n{host}X: {large}").bytes() {
        if slow.write_all(&[byte]).is_err() || begun.elapsed() > Duration::from_secs(10) {
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
    ensure!(
        begun.elapsed() < Duration::from_secs(8),
        "{:?}",
        begun.elapsed()
    );
    serving.interrupt()?;
    Ok(())
}

fn pages_of_the_web_are_kept_out() -> Result<()> {
    let program = Workload::start("alloc", &["hold"])?;
    let serving = Serving::start(&["-p", &program.pid(), "600"])?;
    let port = serving.address.rsplit(':').next().context("no port")?;
    for (host, status) in [
        ("localhost".to_owned(), 200),
        (format!("127.0.0.1:{port}"), 200),
        (format!("[::1]:{port}"), 200),
        (format!("evil.example:{port}"), 403),
        ("localhost.evil.example".to_owned(), 403),
        ("192.0.2.1".to_owned(), 403),
    ] {
        let request = format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let answer = serving.ask(request.as_bytes())?;
        ensure!(answer.status == status, "{host}: {answer:?}");
        let told = answer.body.ends_with(b"# EOF\n");
        ensure!(told == (status == 200), "{host}: {answer:?}");
    }
    serving.interrupt()?;
    Ok(())
}

fn an_address_in_use_is_told_before_the_trace() -> Result<()> {
    let program = Workload::start("alloc", &["hold"])?;
    let serving = Serving::start(&["-p", &program.pid(), "600"])?;
    let second = ["-p", &program.pid(), "--serve", &serving.address, "600"];
    let second = harness::run("memleak", &second)?;
    ensure!(second.status.code() == Some(1), "{second:?}");
    let told = second.stderr.contains("another program serves there");
    ensure!(
        told && second.stderr.contains(&serving.address),
        "{second:?}"
    );
    ensure!(
        !second.stderr.contains("Attaching") && second.stdout.is_empty(),
        "{second:?}"
    );
    ensure!(serving.get("/metrics")?.status == 200);
    let address = serving.address.clone();
    serving.interrupt()?;
    // The port is free again.
    let third = ["-p", &program.pid(), "--serve", &address, "600"];
    let mut third = Tool::start("memleak", &third)?;
    third.wait_for_stderr("probes in")?;
    let ended = third.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}

fn the_end_waits_for_no_client() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("memleak.sock");
    let serve = format!("unix:{}", path.display());
    let program = Workload::start("alloc", &["hold"])?;
    let mut tool = Tool::start("memleak", &["-p", &program.pid(), "--serve", &serve, "600"])?;
    tool.wait_for_stderr("probes in")?;
    let connect = |path: &Path| UnixStream::connect(path).context("nobody serves");
    let hanging: Vec<UnixStream> = (0..10).map(|_| connect(&path)).collect::<Result<_>>()?;
    let mut waiting = connect(&path)?;
    waiting.write_all(b"GET /debug/pprof/heap?seconds=60 HTTP/1.0\r\n\r\n")?;
    thread::sleep(Duration::from_millis(500));
    let begun = Instant::now();
    tool.signal(Signal::SIGTERM)?;
    let ended = tool.wait()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(
        begun.elapsed() < Duration::from_secs(2),
        "{:?}",
        begun.elapsed()
    );
    ensure!(!path.exists(), "the socket is left");
    // A client that waited gets an answer, or sees the end of the connection.
    let mut answer = Vec::new();
    let _ = waiting.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    ensure!(answer.is_empty() || answer.contains(" 503 "), "{answer}");
    drop(hanging);
    Ok(())
}
