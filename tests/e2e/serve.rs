//! `memleak --serve`: what other programs fetch, against the report that is printed, and clients that misbehave.

mod clients;

use std::collections::HashMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::ops::Deref;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use memtools::print::text::grouped;
use tempfile::TempDir;

use crate::export::{by_leaf, pprof, rows, sum, top};
use crate::harness::{self, Tool, ToolOutput, Workload, workload};

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "serve":
        a_heap_is_what_is_reported [Once],
        allocations_are_all_since_the_start [Once],
        a_difference_is_what_came_meanwhile [Once],
        metrics_are_open_metrics [Once],
        the_page_shows_what_is_large_and_what_grows [Once],
        the_page_is_drawn_by_a_browser [Host, Once],
        names_of_others_are_no_markup [Once],
        the_kernels_heap_is_served [Once],
    };
    [own, clients::tests()].into_iter().flatten().collect()
}

/// Arguments for all blocks of any age, all stacks, and no report but the last.
const ALL: [&str; 6] = ["-j", "-o", "0", "-T", "1000", "600"];

/// memleak that serves, and its address.
pub(crate) struct Serving {
    tool: Tool,
    site: Site,
}

impl Deref for Serving {
    type Target = Site;

    fn deref(&self) -> &Site {
        &self.site
    }
}

/// Address of a tool that serves.
pub(crate) struct Site {
    pub(crate) address: String,
}

impl Serving {
    pub(crate) fn start(args: &[&str]) -> Result<Self> {
        Self::start_until("probes in", args)
    }

    fn start_until(live: &str, args: &[&str]) -> Result<Self> {
        let mut tool = Tool::start("memleak", &[&["--serve", "0"], args].concat())?;
        let line = tool.wait_for_line("memleak: serving http://")?;
        tool.wait_for_stderr(live)?;
        let address = line.split("http://").nth(1).context("no address")?;
        let address = address.trim_end_matches('/').to_owned();
        let site = Site { address };
        Ok(Self { tool, site })
    }

    fn interrupt(self) -> Result<ToolOutput> {
        let ended = self.tool.interrupt()?;
        ensure!(ended.status.success(), "{ended:?}");
        Ok(ended)
    }
}

impl Site {
    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(harness::TIMEOUT))?;
        Ok(stream)
    }

    /// Sends a request as it is, and returns the answer.
    pub(crate) fn ask(&self, request: &[u8]) -> Result<Answer> {
        Answer::of(self.connect()?, request)
    }

    pub(crate) fn get(&self, path: &str) -> Result<Answer> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.address);
        self.ask(request.as_bytes())
    }

    /// Returns the text at a path. Fails if the path does not exist.
    pub(crate) fn text(&self, path: &str) -> Result<String> {
        let answer = self.get(path)?;
        ensure!(answer.status == 200, "{path}: {answer:?}");
        Ok(String::from_utf8(answer.body)?)
    }
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: HashMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    fn of(mut stream: impl Read + Write, request: &[u8]) -> Result<Self> {
        // The server may refuse a request before it is completely sent.
        match stream.write_all(request) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            written => written?,
        }
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes)?;
        let end = memchr::memmem::find(&bytes, b"\r\n\r\n").context("no headers")?;
        let head = String::from_utf8(bytes[..end].to_vec())?;
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1));
        let headers = lines.filter_map(|line| line.split_once(": "));
        Ok(Self {
            status: status.context("no status")?.parse()?,
            headers: headers
                .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
                .collect(),
            body: bytes[end + 4..].to_vec(),
        })
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

/// Starts memleak with --serve on a workload, and lets the workload do its work.
fn worked(workload: &[&str], options: &[&str]) -> Result<(Workload, Serving)> {
    let mut program = Workload::start(workload[0], &workload[1..])?;
    let serving = Serving::start(&[&["-p", &program.pid()], options].concat())?;
    program.work()?;
    Ok((program, serving))
}

/// Downloads the heap by curl, which stores it in a directory under the name that the server gives.
fn downloaded_by_curl(serving: &Serving) -> Result<(TempDir, String)> {
    let folder = harness::scratch()?;
    let file = folder.path().join("heap");
    let mut curl = Command::new("curl");
    let curl = curl.args(["-sSf", "--compressed", "-OJ", "-D", "-"]);
    let curl = curl
        .arg(serving.url("/debug/pprof/heap"))
        .current_dir(&folder);
    let curl = curl.output().context("no curl")?;
    ensure!(curl.status.success(), "{curl:?}");
    let headers = String::from_utf8(curl.stdout)?;
    for header in [
        "Content-Type: application/octet-stream\r\n",
        "Content-Disposition: attachment; filename=\"heap\"\r\n",
        "X-Content-Type-Options: nosniff\r\n",
    ] {
        ensure!(headers.contains(header), "no {header} in {headers}");
    }
    let file = file.to_str().context("not UTF-8")?.to_owned();
    Ok((folder, file))
}

/// Checks that the text form has these sums, and the sums of the leaking function.
fn text_form_is_exact(text: &str, blocks: u64, bytes: u64) -> Result<()> {
    let head = format!("heap profile: {blocks}: {bytes} [{blocks}: {bytes}] @ heap/2\n");
    ensure!(text.starts_with(&head), "{text}");
    let of_malloc = text
        .split("\n\n")
        .find(|stack| stack.contains("\tleak_malloc\t"));
    let of_malloc = of_malloc.with_context(|| text.to_owned())?;
    ensure!(
        of_malloc.contains("31: 126883 [31: 126883] @ 0x"),
        "{of_malloc}"
    );
    ensure!(of_malloc.contains("/alloc.c:"), "{of_malloc}");
    Ok(())
}

fn a_heap_is_what_is_reported() -> Result<()> {
    let (_program, serving) = worked(&["alloc", "leak", "31", "4093"], &ALL)?;
    let mut served = Vec::new();
    for path in [
        "/debug/pprof/heap",
        "/debug/pprof/allocs?debug=0",
        "/debug/pprof/heap?gc=1",
    ] {
        for value in ["inuse_space", "inuse_objects"] {
            served.push((path, value, top(&serving.url(path), value)?));
        }
    }
    let shown = pprof(&serving.url("/debug/pprof/heap"), &["-top"])?;
    ensure!(shown.contains("Type: inuse_space"), "{shown}");

    let (_folder, file) = downloaded_by_curl(&serving)?;
    served.push(("curl", "inuse_space", top(&file, "inuse_space")?));
    let image = serving.text("/flame.svg")?;
    // pprof reads the text form by its parser for profiles that C++ programs wrote before pprof had its own format.
    let text = serving.get("/debug/pprof/heap?debug=1")?;
    let is_text = text.header("content-type") == "text/plain; charset=utf-8";
    ensure!(text.status == 200 && is_text, "{text:?}");
    let (_, text_total) = top(&serving.url("/debug/pprof/heap?debug=1"), "inuse_space")?;
    let text = String::from_utf8(text.body)?;

    let ended = serving.interrupt()?;
    let (reports, stacks) = (rows(&ended, "report")?, rows(&ended, "stack")?);
    ensure!(reports.len() == 1, "{reports:?}");
    let (blocks, bytes) = (sum(&reports, "allocations"), sum(&reports, "bytes"));
    text_form_is_exact(&text, blocks, bytes)?;
    ensure!(text_total == bytes, "{text_total}: {text}");
    for (path, value, (flat, total)) in served {
        let field = if value == "inuse_space" {
            "bytes"
        } else {
            "allocations"
        };
        ensure!(
            total == sum(&reports, field),
            "{path} {value} {total}: {reports:?}"
        );
        ensure!(
            flat == by_leaf(&stacks, field)?,
            "{path} {value} {flat:?}: {stacks:#?}"
        );
    }
    let all = format!("{} bytes", grouped(sum(&reports, "bytes")));
    ensure!(image.contains(&all), "no {all}");
    let bytes = "leak_malloc (126,883 bytes, ";
    ensure!(image.contains(bytes), "no {bytes}");
    Ok(())
}

/// Returns the sum of a metric over its series. None if there is no such metric.
fn sum_of_metric(metrics: &str, name: &str) -> Option<u64> {
    let rows = metrics.lines().filter_map(|line| line.strip_prefix(name));
    let series = rows.filter(|row| row.starts_with(['{', ' ']));
    let numbers = series.filter_map(|row| row.rsplit(' ').next()?.parse::<u64>().ok());
    numbers.reduce(|one, other| one + other)
}

fn allocations_are_all_since_the_start() -> Result<()> {
    let options = ["-j", "--mode", "alloc", "-T", "1000", "600"];
    let (_program, serving) = worked(&["alloc", "balanced", "31", "4093"], &options)?;
    let url = serving.url("/debug/pprof/allocs");
    let (space, objects) = (top(&url, "alloc_space")?, top(&url, "alloc_objects")?);
    let metrics = serving.text("/metrics")?;
    // Serving does not reset the counts of the next report.
    let reports = rows(&serving.interrupt()?, "report")?;
    ensure!(
        space.1 > 0 && space.1 == sum(&reports, "bytes"),
        "{space:?}: {reports:?}"
    );
    ensure!(
        objects.1 == sum(&reports, "allocations"),
        "{objects:?}: {reports:?}"
    );
    let served = [
        "memtools_memleak_allocated_bytes_total",
        "memtools_memleak_allocations_total",
    ];
    let served = served.map(|name| sum_of_metric(&metrics, name));
    ensure!(served == [Some(space.1), Some(objects.1)], "{metrics}");
    Ok(())
}

fn a_difference_is_what_came_meanwhile() -> Result<()> {
    let before = ["alloc", "one", "malloc", "31", "4093"];
    let mut other = Workload::start("alloc", &["one", "calloc", "37", "211"])?;
    let mut program = Workload::start(before[0], &before[1..])?;
    let pids = format!("{},{}", program.pid(), other.pid());
    let serving = Serving::start(&[&["-p", &pids], &ALL[..]].concat())?;
    program.work()?;
    let folder = harness::scratch()?;
    let site = &serving.site;
    let answer = thread::scope(|scope| {
        let asks = scope.spawn(|| site.get("/debug/pprof/heap?seconds=4"));
        // The first of the two reports is made at once, because no client has asked before.
        thread::sleep(Duration::from_secs(2));
        other.work()?;
        asks.join().map_err(|_| anyhow::anyhow!("it panicked"))?
    })?;
    ensure!(answer.status == 200, "{answer:?}");
    let disposition = "attachment; filename=\"heap-delta\"";
    ensure!(
        answer.header("content-disposition") == disposition,
        "{answer:?}"
    );
    let file = folder.path().join("delta");
    fs::write(&file, &answer.body)?;
    let file = file.to_str().context("not UTF-8")?;
    for (value, expected) in [("inuse_space", 37 * 211), ("inuse_objects", 37)] {
        let (flat, total) = top(file, value)?;
        ensure!(total == expected, "{value} {total}");
        let only = HashMap::from([("leak_calloc".to_owned(), expected)]);
        ensure!(flat == only, "{value} {flat:?}");
    }
    let ended = serving.interrupt()?;
    let all = sum(&rows(&ended, "report")?, "bytes");
    ensure!(all >= 31 * 4093 + 37 * 211, "{all}");
    Ok(())
}

fn metrics_are_open_metrics() -> Result<()> {
    let (_program, serving) = worked(&["alloc", "leak", "31", "4093"], &ALL)?;
    let answer = serving.get("/metrics")?;
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ensure!(answer.header("content-type") == content_type, "{answer:?}");
    let text = String::from_utf8(answer.body)?;
    let script = "import sys, json\n\
         from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse\n\
         samples = [s for family in parse(sys.argv[1]) for s in family.samples]\n\
         print(json.dumps([[s.name, s.labels, s.value] for s in samples]))";
    let client = Command::new("/usr/bin/python3")
        .args(["-c", script, &text])
        .output()?;
    ensure!(client.status.success(), "{client:?} of {text}");
    let samples: Vec<(String, HashMap<String, String>, f64)> =
        serde_json::from_slice(&client.stdout)?;
    let older = serving.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain;version=0.0.4,*/*;q=0.1\r\n\r\n")?;
    ensure!(
        older.header("content-type") == "text/plain; version=0.0.4; charset=utf-8",
        "{older:?}"
    );
    let older = String::from_utf8(older.body)?;
    let client = Command::new("/usr/bin/python3")
        .args(["-c", &script.replace("openmetrics.", ""), &older])
        .output()?;
    ensure!(client.status.success(), "{client:?} of {older}");
    let same: Vec<(String, HashMap<String, String>, f64)> = serde_json::from_slice(&client.stdout)?;
    ensure!(same.len() == samples.len(), "{older} is not {text}");
    let reports = rows(&serving.interrupt()?, "report")?;
    for (name, field) in [
        ("memtools_memleak_outstanding_bytes", "bytes"),
        ("memtools_memleak_outstanding_allocations", "allocations"),
        ("memtools_memleak_outstanding_stacks", "stacks"),
        ("memtools_memleak_unseen_frees_total", "unseen_frees"),
        ("memtools_memleak_unknown_frees_total", "unknown_frees"),
        ("memtools_memleak_double_frees_total", "double_frees"),
    ] {
        let series = samples.iter().filter(|(of, ..)| of == name);
        let value = series
            .map(|(_, _, value)| *value)
            .reduce(|one, other| one + other);
        let value = value.with_context(|| format!("no {name} in {text}"))?;
        ensure!(
            value == sum(&reports, field) as f64,
            "{name} {value}: {reports:?}"
        );
    }
    let of_process = samples
        .iter()
        .find(|(name, ..)| name == "memtools_memleak_outstanding_bytes");
    let (_, labels, _) = of_process.context("no process")?;
    ensure!(labels["comm"] == "alloc", "{labels:?}");
    let lost = samples
        .iter()
        .filter(|(name, ..)| name == "memtools_lost_total");
    ensure!(lost.count() == 7, "{text}");
    let info = samples
        .iter()
        .find(|(name, ..)| name == "memtools_memleak_info");
    let (_, labels, _) = info.context("no info")?;
    ensure!(labels["target"].ends_with("(alloc)"), "{labels:?}");
    Ok(())
}

fn the_page_shows_what_is_large_and_what_grows() -> Result<()> {
    let mut program = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let serving = Serving::start(&["-p", &program.pid(), "-o", "0", "600"])?;
    let nothing = serving.get("/")?;
    let page = String::from_utf8(nothing.body.clone())?;
    ensure!(page.contains("<p>none grows</p>"), "{page}");
    let policy = nothing.header("content-security-policy");
    ensure!(policy.starts_with("default-src 'none'"), "{policy}");
    program.work()?;
    // The page must not have the earlier report.
    thread::sleep(Duration::from_millis(1500));
    let page = serving.text("/")?;
    for part in [
        "memleak: outstanding allocations of pid ",
        "31 allocations, 126.9 kB (126,883 bytes)",
        "nothing lost",
        "<iframe src=\"flame.svg\"",
        "<polyline ",
    ] {
        ensure!(page.contains(part), "no {part} in {page}");
    }
    // The function is in both tables, folded and unfolded.
    ensure!(page.matches("leak_malloc+").count() == 4, "{page}");
    for foreign in ["<script", "http://", "https://", "//"] {
        ensure!(!page.contains(foreign), "{foreign} in {page}");
    }
    let flame = serving.get("/flame.svg")?;
    ensure!(
        flame.header("content-type").starts_with("image/svg+xml"),
        "{flame:?}"
    );
    serving.interrupt()?;
    Ok(())
}

/// The pictures are kept in target/pictures, to be looked at.
fn the_page_is_drawn_by_a_browser() -> Result<()> {
    let mut program = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let serving = Serving::start(&["-p", &program.pid(), "-o", "0", "600"])?;
    program.work()?;
    // The page must not have the earlier report.
    thread::sleep(Duration::from_millis(1500));
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/target/pictures");
    fs::create_dir_all(folder)?;
    let home = harness::scratch()?;
    for (page, name) in [("/", "page"), ("/flame.svg", "flame")] {
        for width in [1280_u32, 400] {
            let picture = format!("{folder}/serve-{name}-{width}.png");
            let drawn = harness::chromium(60, home.path())
                .args(["--disable-gpu", "--virtual-time-budget=5000"])
                .arg(format!("--window-size={width},900"))
                .arg(format!("--screenshot={picture}"))
                .arg(format!("http://{}{page}", serving.address))
                .output()?;
            ensure!(drawn.status.success(), "no chromium: {drawn:?}");
            let picture = fs::read(picture)?;
            // The width of a PNG is at byte 16.
            let drawn = picture.get(16..20).context("no picture")?;
            ensure!(drawn == width.to_be_bytes(), "{drawn:?}");
        }
    }
    serving.interrupt()?;
    Ok(())
}

fn names_of_others_are_no_markup() -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("<i>&\"'<s>");
    harness::copy(&workload("alloc"), &program)?;
    let mut program = Workload::spawn(Command::new(&program).args(["one", "malloc", "7", "11"]))?;
    let serving = Serving::start(&["-p", &program.pid(), "-o", "0", "600"])?;
    program.work()?;
    for path in ["/", "/flame.svg"] {
        let text = serving.text(path)?;
        ensure!(text.contains("&lt;i&gt;&amp;"), "{path}: {text}");
        ensure!(
            !text.contains("<i>") && !text.contains("<s>"),
            "{path}: {text}"
        );
    }
    serving.interrupt()?;
    Ok(())
}

fn the_kernels_heap_is_served() -> Result<()> {
    let mut program = Workload::start("kmem", &["pipes", "101"])?;
    let args = [
        "-kp",
        &program.pid(),
        "-o",
        "0",
        "-T",
        "100000",
        "-j",
        "600",
    ];
    let serving = Serving::start_until("memleak: tracing", &args)?;
    program.work()?;
    let (flat, total) = top(&serving.url("/debug/pprof/heap"), "inuse_space")?;
    let metrics = serving.text("/metrics")?;
    let ended = serving.interrupt()?;
    let (reports, stacks) = (rows(&ended, "report")?, rows(&ended, "stack")?);
    ensure!(
        total > 0 && total == sum(&reports, "bytes"),
        "{total}: {reports:?}"
    );
    ensure!(!flat.is_empty() && !stacks.is_empty(), "{flat:?}");
    let served = sum_of_metric(&metrics, "memtools_memleak_outstanding_bytes");
    ensure!(served == Some(total), "{metrics}");
    let ended = harness::run("memleak", &["--by-cache", "--serve", "0"])?;
    ensure!(ended.status.code() == Some(2), "{ended:?}");
    Ok(())
}

fn other_machines_are_kept_out() -> Result<()> {
    let program = Workload::start("alloc", &["hold"])?;
    let args = ["-p", &program.pid(), "--serve", "0.0.0.0:0", "600"];
    let refused = harness::run("memleak", &args)?;
    ensure!(refused.status.code() == Some(2), "{refused:?}");
    ensure!(refused.stderr.contains("add --serve-remote"), "{refused:?}");
    let mut tool = Tool::start("memleak", &[&args[..], &["--serve-remote"]].concat())?;
    let line = tool.wait_for_line("serving http://0.0.0.0:")?;
    tool.wait_for_stderr("probes in")?;
    let port: u16 = line
        .trim_end_matches('/')
        .rsplit(':')
        .next()
        .context("no port")?
        .parse()?;
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    let answer = Answer::of(
        stream,
        b"GET /metrics HTTP/1.1\r\nHost: any.example\r\n\r\n",
    )?;
    ensure!(answer.status == 200, "{answer:?}");
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}
