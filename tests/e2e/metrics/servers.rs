//! Servers that store metrics: Prometheus and VictoriaMetrics fetch what memleak and memagent serve, and what
//! node_exporter reads of the files that tools write.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::harness::{self, Tool, Workload, eventually};
use crate::memagent::Agent;
use crate::pressure::meminfo_kb;
use crate::serve::{Serving, Site};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A server of another project, which is killed when the value is dropped.
struct Server {
    child: Child,
    site: Site,
}

impl Server {
    /// Starts a program of target/servers that listens at the address which this option gets.
    fn start(program: &str, listen: &str, args: &[String]) -> Result<Self> {
        // The kernel gives another port each time. None of these servers prints the port that it got.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let child = Command::new(Path::new(ROOT).join("target/servers").join(program))
            .arg(format!("{listen}={address}"))
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child =
            child.with_context(|| format!("no {program}, which scripts/prerequisites unpacks"))?;
        let site = Site { address };
        Ok(Self { child, site })
    }

    /// Returns the sum of a metric over all its series, or None while the server has none.
    fn sum(&self, metric: &str) -> Result<Option<f64>> {
        // By this version the server ends the connection behind its answer.
        let request = format!("GET /api/v1/query?query={metric} HTTP/1.0\r\n\r\n");
        let Ok(answer) = self.site.ask(request.as_bytes()) else {
            return Ok(None);
        };
        if answer.status != 200 {
            return Ok(None);
        }
        let found: Value = serde_json::from_slice(&answer.body)?;
        let series = found["data"]["result"].as_array().context("no result")?;
        let value = |one: &Value| one["value"][1].as_str()?.parse::<f64>().ok();
        let values: Option<Vec<f64>> = series.iter().map(value).collect();
        let values = values.with_context(|| format!("{found}"))?;
        Ok((!values.is_empty()).then(|| values.iter().sum()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Traces 23 calls that grow the heap of a process, 7 that shrink it and 5 that do neither, for a file of metrics.
fn trace(file: &Path) -> Result<()> {
    let mut program = Workload::start("brk", &["23", "7", "5"])?;
    let file = file.to_string_lossy();
    let mut tool = Tool::start("brkstack", &["-p", &program.pid(), "--export", &file])?;
    tool.wait_for_stderr("tracing brk(2)")?;
    program.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}

pub(super) fn servers_store_what_tools_serve_and_write() -> Result<()> {
    let folder = harness::scratch()?;
    let written = folder.path().join("textfile");
    fs::create_dir(&written)?;
    // Two runs of one tool: their series differ.
    for name in ["one.prom", "two.prom"] {
        trace(&written.join(name))?;
    }
    let written = format!("--collector.textfile.directory={}", written.display());
    let exporter = Server::start(
        "prometheus-node-exporter",
        "--web.listen-address",
        &[written],
    )?;
    let mut program = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let serving = Serving::start(&["-p", &program.pid(), "-o", "0", "-T", "1000", "600"])?;
    program.work()?;
    let agent = Agent::start("")?;

    let scraped = [
        ("exporter", &exporter.site),
        ("memleak", &serving),
        ("memagent", &agent.site),
    ];
    let jobs = scraped.map(
        |(name, site)| json!({"job_name": name, "static_configs": [{"targets": [site.address]}]}),
    );
    let config = json!({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs});
    let file = folder.path().join("prometheus.yml");
    // JSON is YAML.
    fs::write(&file, config.to_string())?;
    let file = file.display();
    let data = |name: &str| folder.path().join(name).display().to_string();
    let prometheus = [
        format!("--config.file={file}"),
        format!("--storage.tsdb.path={}", data("prometheus")),
    ];
    let victoria = [
        format!("-promscrape.config={file}"),
        format!("-storageDataPath={}", data("victoria")),
        "-search.latencyOffset=0s".to_owned(),
        // What is on this disk is the machine's own business.
        "-storage.minFreeDiskSpaceBytes=0".to_owned(),
    ];
    let servers = [
        Server::start("prometheus", "--web.listen-address", &prometheus)?,
        Server::start("victoria-metrics", "-httpListenAddr", &victoria)?,
    ];
    let expected = [
        ("up", 3.0),
        ("node_textfile_scrape_error", 0.0),
        ("memtools_brk_calls_total", 70.0),
        ("memtools_memleak_outstanding_bytes", f64::from(31 * 4093)),
        (
            "memagent_node_memory_bytes",
            (meminfo_kb("MemTotal")? << 10) as f64,
        ),
    ];
    for server in &servers {
        for (metric, expected) in expected {
            let mut last = None;
            let stored = eventually(metric, || {
                last = server.sum(metric)?;
                Ok(last == Some(expected))
            });
            stored.with_context(|| format!("{last:?}, not {expected}"))?;
        }
    }
    Ok(())
}
