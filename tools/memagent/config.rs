//! The configuration: one TOML file, in which each key is optional and unknown keys are refused.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use jiff::SignedDuration;
use memtools::export::spool::Limits;
use memtools::parse;
use memtools::print::text;
use memtools::process::labels::Workload;
use memtools::push::client::Store;
use memtools::push::format::Format;
use memtools::serve::address::{self, Address};
use memtools::watch::growth::Thresholds;
use serde::{Deserialize, Serialize};

use crate::tracing::MAX_SLOTS;

/// Maximum number of labels in the file.
const MAX_LABELS: usize = 5;
/// File that is read if no other one is named. It need not exist.
pub(crate) const DEFAULT_FILE: &str = "/etc/memagent.toml";
/// Maximum size of the file, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Whole configuration.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    pub(crate) watch: Watch,
    pub(crate) rule: Rule,
    pub(crate) trace: Trace,
    pub(crate) spool: SpoolOptions,
    pub(crate) metrics: Metrics,
    pub(crate) push: Push,
    /// Labels of all profiles that are pushed, beside those of what was traced.
    pub(crate) labels: BTreeMap<String, String>,
}

/// What is read, and how often.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Watch {
    /// Time between two looks at the machine and at cgroups.
    pub(crate) cgroups_every: Span,
    /// Time between two looks at all processes.
    pub(crate) processes_every: Span,
    /// Directory of the hierarchy of cgroups; empty for that of the mounts.
    pub(crate) cgroup_root: PathBuf,
    /// Directory with the kubelet's log files, whose names are read.
    pub(crate) container_logs: PathBuf,
}

/// Thresholds of suspicion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Rule {
    pub(crate) mark: Percent,
    pub(crate) leave: Percent,
    pub(crate) soon: Span,
    pub(crate) slow: Span,
}

/// Traces of processes that grow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Trace {
    pub(crate) enabled: bool,
    /// Time of a trace.
    #[serde(rename = "for")]
    pub(crate) duration: Span,
    /// Number of processes that are traced at the same time.
    pub(crate) processes: u8,
    /// Time of all traces in an hour.
    pub(crate) budget: Span,
    /// Share of the process's CPU time that the programs of the probes may take, which memleak keeps by sampling.
    pub(crate) overhead: Percent,
    /// Share of the process's CPU time that a trace may cost in all, beyond which it ends.
    pub(crate) most_cost: Percent,
    /// Names of programs, units, containers, pods and namespaces that are traced; all if there is none.
    pub(crate) allow: Vec<String>,
    /// Names of programs, units, containers, pods and namespaces that are not traced.
    pub(crate) deny: Vec<String>,
}

/// Profile store that traces are sent to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Push {
    /// Address; empty for no store.
    pub(crate) url: String,
    pub(crate) format: PushFormat,
    /// Bytes of profiles that wait to be sent.
    pub(crate) queue: QueueSize,
    /// File with a token; empty for none.
    pub(crate) token_file: PathBuf,
    /// File with the certificates of authorities; empty for those of the system.
    pub(crate) ca_file: PathBuf,
    /// Tenant of a store that has several (X-Scope-OrgID); empty for none.
    pub(crate) tenant: String,
}

/// Format of requests, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct PushFormat(pub(crate) Format);

impl Default for PushFormat {
    fn default() -> Self {
        Self(Format::Pyroscope)
    }
}

impl TryFrom<String> for PushFormat {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let found = Format::NAMES.iter().find(|(name, _)| *name == text);
        found
            .map(|&(_, format)| Self(format))
            .ok_or_else(|| "must be \"pyroscope\" or \"otlp\"".to_owned())
    }
}

impl From<PushFormat> for String {
    fn from(PushFormat(format): PushFormat) -> Self {
        let found = Format::NAMES.iter().find(|(_, other)| *other == format);
        found.map_or_else(String::new, |(name, _)| (*name).to_owned())
    }
}

/// Size of the queue in the file.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct QueueSize(pub(crate) Size);

impl Default for QueueSize {
    fn default() -> Self {
        Self(Size(64 << 20))
    }
}

/// Where incidents are written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct SpoolOptions {
    /// Directory; empty for none.
    pub(crate) folder: PathBuf,
    /// Number of incidents that are kept.
    pub(crate) incidents: usize,
    /// Bytes of incidents that are kept.
    pub(crate) bytes: Size,
}

/// Numbers for Prometheus.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Metrics {
    /// Address; empty for no server.
    pub(crate) listen: String,
    /// Number of cgroups with series of their own.
    pub(crate) cgroups: usize,
    /// Number of processes with a series.
    pub(crate) processes: usize,
}

impl Default for Watch {
    fn default() -> Self {
        Self {
            cgroups_every: Span(Duration::from_secs(1)),
            processes_every: Span(Duration::from_secs(15)),
            cgroup_root: PathBuf::new(),
            container_logs: memtools::process::labels::CONTAINER_LOGS.into(),
        }
    }
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            mark: Percent(85.0),
            leave: Percent(75.0),
            soon: Span(Duration::from_secs(180)),
            slow: Span(Duration::from_secs(24 * 3600)),
        }
    }
}

impl Default for Trace {
    fn default() -> Self {
        Self {
            enabled: false,
            duration: Span(Duration::from_secs(120)),
            processes: 2,
            budget: Span(Duration::from_secs(600)),
            overhead: Percent(2.0),
            most_cost: Percent(5.0),
            allow: Vec::new(),
            deny: Vec::new(),
        }
    }
}

impl Trace {
    /// Whether a process of this name, in what runs in its cgroup, is not to be traced.
    pub(crate) fn denies(&self, comm: &str, workload: &Workload) -> bool {
        let Workload {
            unit,
            namespace,
            pod,
            container,
            ..
        } = workload;
        let names = [comm, unit, namespace, pod, container];
        let has_one = |list: &[String]| list.iter().any(|name| names.contains(&&**name));
        has_one(&self.deny) || !(self.allow.is_empty() || has_one(&self.allow))
    }
}

impl Default for SpoolOptions {
    fn default() -> Self {
        Self {
            folder: "/var/lib/memagent".into(),
            incidents: 50,
            bytes: Size(512 << 20),
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:9754".into(),
            cgroups: 300,
            processes: 20,
        }
    }
}

/// Time in the file, such as `"15s"` or `"24h"`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Span(pub(crate) Duration);

impl TryFrom<String> for Span {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let span = text.parse::<SignedDuration>().ok();
        let span = span.and_then(|span| Duration::try_from(span).ok());
        let span = span.filter(|span| !span.is_zero());
        span.map(Self)
            .ok_or_else(|| "must be a time, such as \"15s\", \"3m\" or \"24h\"".to_owned())
    }
}

impl From<Span> for String {
    fn from(Span(span): Span) -> Self {
        SignedDuration::try_from(span).map_or_else(|_| String::new(), |span| format!("{span:#}"))
    }
}

/// Share in the file, such as `"85%"`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Percent(pub(crate) f64);

impl TryFrom<String> for Percent {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let number = text
            .strip_suffix('%')
            .and_then(|number| number.parse().ok());
        let number = number.filter(|number| (1.0..=100.0).contains(number));
        number
            .map(Self)
            .ok_or_else(|| "must be a share from \"1%\" to \"100%\"".to_owned())
    }
}

impl From<Percent> for String {
    fn from(Percent(number): Percent) -> Self {
        format!("{number}%")
    }
}

/// Number of bytes in the file, such as `"512M"`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Size(pub(crate) u64);

impl TryFrom<String> for Size {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        parse::bytes(&text).map(Self)
    }
}

impl From<Size> for String {
    fn from(Size(bytes): Size) -> Self {
        let units = [(30, "G"), (20, "M"), (10, "K")];
        let unit = units
            .iter()
            .find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
        unit.map_or_else(
            || bytes.to_string(),
            |(shift, unit)| format!("{}{unit}", bytes >> shift),
        )
    }
}

impl Config {
    /// Reads the configuration: of a file that is named, or else of the default file, if there is one.
    ///
    /// # Errors
    /// If the named file does not exist, or a key or value is wrong.
    pub(crate) fn load(named: Option<&Path>) -> Result<Self> {
        let path = named.unwrap_or(Path::new(DEFAULT_FILE));
        let shown = text::escape_bytes(path.as_os_str().as_encoded_bytes());
        let text = match read(path) {
            Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => {
                String::new()
            }
            text => text.with_context(|| format!("failed to read {shown}"))?,
        };
        Self::parse(&text).with_context(|| format!("{shown} is wrong"))
    }

    fn parse(file: &str) -> Result<Self> {
        let config: Self = match toml::from_str(file) {
            Ok(config) => config,
            Err(error) => bail!(place_and_reason(file, &error)),
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        let second = Duration::from_secs(1);
        let Watch {
            cgroups_every,
            processes_every,
            ..
        } = &self.watch;
        ensure!(
            (second..=15 * second).contains(&cgroups_every.0),
            "watch.cgroups_every: must be from \"1s\" to \"15s\""
        );
        ensure!(
            (cgroups_every.0..=3600 * second).contains(&processes_every.0),
            "watch.processes_every: must be from watch.cgroups_every to \"1h\""
        );
        ensure!(
            self.rule.leave.0 < self.rule.mark.0,
            "rule.leave: must be below rule.mark"
        );
        ensure!(
            self.metrics.cgroups <= 2000 && self.metrics.processes <= 2000,
            "metrics.cgroups and metrics.processes: must be at most 2000"
        );
        let trace = &self.trace;
        ensure!(
            (1..=MAX_SLOTS).contains(&trace.processes),
            "trace.processes: must be from 1 to {MAX_SLOTS}"
        );
        ensure!(
            (10 * second..=120 * second).contains(&trace.duration.0),
            "trace.for: must be from \"10s\" to \"2m\""
        );
        ensure!(
            (trace.duration.0..=3600 * second).contains(&trace.budget.0),
            "trace.budget: must be from trace.for to \"1h\""
        );
        ensure!(
            self.labels.len() <= MAX_LABELS && self.labels.keys().all(|name| is_label_name(name)),
            "labels: must be at most {MAX_LABELS}, with names of letters, digits and _"
        );
        ensure!(
            !trace.enabled || !self.spool.folder.as_os_str().is_empty(),
            "trace.enabled: needs spool.folder, which has the profiles"
        );
        if let Some(store) = self.store() {
            store.check().context("push.url")?;
            ensure!(
                trace.enabled,
                "push.url: needs trace.enabled = true, as profiles are those of traces"
            );
        }
        self.listen_address()?;
        Ok(())
    }

    /// Returns the store that profiles are pushed to. None if they are not pushed.
    pub(crate) fn store(&self) -> Option<Store> {
        let file = |path: &PathBuf| {
            Some(path)
                .filter(|path| !path.as_os_str().is_empty())
                .cloned()
        };
        let push = &self.push;
        (!push.url.is_empty()).then(|| Store {
            url: push.url.clone(),
            token_file: file(&push.token_file),
            ca_file: file(&push.ca_file),
            tenant: push.tenant.clone(),
        })
    }

    /// Returns the address of the metrics. None if they are not served.
    ///
    /// # Errors
    /// If it is no address.
    pub(crate) fn listen_address(&self) -> Result<Option<Address>> {
        let listen = &self.metrics.listen;
        if listen.is_empty() {
            return Ok(None);
        }
        match address::parse(listen) {
            Ok(address) => Ok(Some(address)),
            Err(reason) => bail!("metrics.listen: {reason}"),
        }
    }

    /// Returns how many incidents are kept.
    pub(crate) fn spool_limits(&self) -> Limits {
        Limits {
            folders: self.spool.incidents,
            bytes: self.spool.bytes.0,
        }
    }

    /// Returns the thresholds of the rules.
    pub(crate) fn thresholds(&self) -> Thresholds {
        Thresholds {
            mark: self.rule.mark.0 / 100.0,
            leave: self.rule.leave.0 / 100.0,
            soon: self.rule.soon.0,
            slow: self.rule.slow.0,
        }
    }

    /// Formats the configuration as a file with all keys.
    ///
    /// # Errors
    /// If a value has no form in TOML.
    pub(crate) fn text(&self) -> Result<String> {
        toml::to_string(self).context("failed to print the configuration")
    }
}

/// Reads a regular file of limited size: a FIFO would never end.
fn read(path: &Path) -> io::Result<String> {
    let status = fs::metadata(path)?;
    if !status.is_file() || status.len() > MAX_BYTES {
        let reason = "it is no regular file of at most 1 MiB";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    fs::read_to_string(path)
}

/// Returns the line and column of a mistake, and the reason, in one line.
fn place_and_reason(file: &str, error: &toml::de::Error) -> String {
    let reason = text::escape(error.message()).into_owned();
    let Some(before) = error.span().and_then(|span| file.get(..span.start)) else {
        return reason;
    };
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
    format!("line {line}, column {column}: {reason}")
}

/// Whether profile stores take a label of this name.
fn is_label_name(name: &str) -> bool {
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !name.is_empty() && !name.as_bytes()[0].is_ascii_digit() && name.bytes().all(is_of_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(file: &str) -> String {
        match Config::parse(file) {
            Ok(config) => panic!("{config:?}"),
            Err(error) => format!("{error:#}"),
        }
    }

    #[test]
    fn lists_name_what_is_traced() {
        let workload = Workload {
            unit: "redis.service".into(),
            namespace: "shop".into(),
            ..Workload::default()
        };
        let denies = |allow: &[&str], deny: &[&str]| {
            let list = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
            let trace = Trace {
                allow: list(allow),
                deny: list(deny),
                ..Trace::default()
            };
            trace.denies("redis-server", &workload)
        };
        assert!(!denies(&[], &[]));
        assert!(!denies(&["other", "shop"], &["other"]));
        assert!(denies(&["other"], &[]) && denies(&[], &["redis.service"]));
        assert!(denies(&["shop"], &["redis-server"]), "deny has precedence");
    }

    #[test]
    fn every_key_has_a_default_and_is_printed() {
        let config = Config::parse("").expect("defaults");
        assert_eq!(config, Config::default());
        let text = config.text().expect("a file");
        assert_eq!(Config::parse(&text).expect("the same"), config);
        for line in [
            "cgroups_every = \"1s\"",
            "slow = \"24h\"",
            "mark = \"85%\"",
            "cgroups = 300",
            "bytes = \"512M\"",
            "for = \"2m\"",
            "budget = \"10m\"",
            "format = \"pyroscope\"",
            "queue = \"64M\"",
        ] {
            assert!(
                text.lines().any(|printed| printed == line),
                "{line}: {text}"
            );
        }
        let some = Config::parse("[rule]\nmark = \"90.5%\"\nsoon = \"90s\"\n").expect("a file");
        assert_eq!((some.rule.mark.0, some.rule.soon.0.as_secs()), (90.5, 90));
        assert_eq!(some.watch, Watch::default());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let message = wrong("[watch]\ncgroups_every = \"1s\"\n  evry = 5\n");
        assert!(
            message.starts_with("line 3, column 3: unknown field `evry`"),
            "{message}"
        );
        let message = wrong("[whatever]\n");
        assert!(
            message.starts_with("line 1, column 2: unknown field `whatever`"),
            "{message}"
        );
        for (file, reason) in [
            (
                "[rule]\nmark = \"85\"\n",
                "line 2, column 8: must be a share",
            ),
            ("[rule]\nmark = \"NaN%\"\n", "must be a share"),
            ("[rule]\nsoon = \"-3m\"\n", "must be a time"),
            ("[rule]\nsoon = 3\n", "line 2, column 8: invalid type"),
            (
                "[rule]\nmark = \"50%\"\n",
                "rule.leave: must be below rule.mark",
            ),
            (
                "[watch]\ncgroups_every = \"10ms\"\n",
                "watch.cgroups_every: must be from",
            ),
            (
                "[metrics]\nlisten = \"here\"\n",
                "metrics.listen: must be a port",
            ),
            (
                "[metrics]\ncgroups = -1\n",
                "line 2, column 11: invalid value",
            ),
            ("[metrics]\ncgroups = 100000\n", "must be at most 2000"),
            ("[trace]\nprocesses = 9\n", "must be from 1 to 8"),
            ("[trace]\nfor = \"3m\"\n", "trace.for: must be from"),
            ("[trace]\nbudget = \"1m\"\n", "trace.budget: must be from"),
            (
                "[labels]\n\"a-b\" = \"x\"\n",
                "labels: must be at most 5, with",
            ),
            ("[push]\nformat = \"jaeger\"\n", "must be \"pyroscope\" or"),
            (
                "[push]\nurl = \"x://y\"\n",
                "push.url: must begin with https:// or",
            ),
            (
                "[push]\nurl = \"http://store:4040\"\ntoken_file = \"/t\"\n",
                "push.url: must begin with https://, so that",
            ),
            (
                "[trace]\nenabled = true\n[spool]\nfolder = \"\"\n",
                "trace.enabled: needs spool.folder",
            ),
            (
                "[push]\nurl = \"https://store\"\n",
                "push.url: needs trace.enabled",
            ),
            ("[metrics\n", "line 1, column 9: "),
            ("\u{1b}[2J = 1\n", "line 1, column "),
        ] {
            let message = wrong(file);
            assert!(
                message.contains(reason) && !message.contains('\u{1b}'),
                "{file}: {message}"
            );
        }
    }

    #[test]
    fn only_the_default_file_may_be_missing() {
        let folder = tempfile::tempdir().expect("a directory");
        let error = Config::load(Some(&folder.path().join("x"))).expect_err("there is none");
        assert!(format!("{error:#}").contains("failed to read"), "{error:#}");
        let error = Config::load(Some(folder.path())).expect_err("a directory");
        assert!(
            format!("{error:#}").contains("no regular file"),
            "{error:#}"
        );
    }
}
