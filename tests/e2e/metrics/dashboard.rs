//! The dashboard of packaging/grafana: its layout, its metrics, and its expressions as promtool parses them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::harness;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// Columns of Grafana's grid.
const COLUMNS: u64 = 24;

pub(super) fn the_dashboard_shows_what_tools_write() -> Result<()> {
    let file = Path::new(ROOT).join("packaging/grafana/memtools.json");
    let dashboard: Value = serde_json::from_slice(&fs::read(&file)?)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    panels_have_places_of_their_own(panels)?;
    let expressions: Vec<&str> = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().into_iter().flatten())
        .filter_map(|target| target["expr"].as_str())
        .collect();
    ensure!(expressions.len() >= panels.len(), "{expressions:?}");
    let families = documented_families()?;
    for expression in &expressions {
        for name in names(expression) {
            let known = ["", "_bucket", "_sum", "_count"].iter().any(|suffix| {
                let family = name.strip_suffix(suffix);
                family.is_some_and(|family| families.contains(family))
            });
            ensure!(known, "no tool writes {name}: {families:?}");
        }
    }
    promtool_parses(&expressions)?;
    let mut schema = Command::new("/usr/bin/python3");
    schema
        .arg(Path::new(ROOT).join("tests/e2e/metrics/dashboard.py"))
        .arg(&file)
        .env("PYTHONPATH", Path::new(ROOT).join("target/grafana"));
    let schema = schema.output()?;
    ensure!(schema.status.success(), "{schema:?}");
    Ok(())
}

fn panels_have_places_of_their_own(panels: &[Value]) -> Result<()> {
    let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
    for panel in panels {
        ensure!(
            ids.insert(panel["id"].as_u64().context("no id")?),
            "{panel}"
        );
        let place = |name: &str| panel["gridPos"][name].as_u64().context("no place");
        let (x, y, w, h) = (place("x")?, place("y")?, place("w")?, place("h")?);
        ensure!(w > 0 && h > 0 && x + w <= COLUMNS, "{panel}");
        for row in y..y + h {
            for column in x..x + w {
                ensure!(cells.insert((row, column)), "{panel} covers another one");
            }
        }
    }
    Ok(())
}

/// Returns the names of metrics in a text.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(move |c: char| !is_name(c))
        .filter(|word| word.starts_with("memtools_"))
}

/// Returns the metrics that man pages name.
fn documented_families() -> Result<BTreeSet<String>> {
    let mut families = BTreeSet::new();
    for entry in fs::read_dir(Path::new(ROOT).join("tools"))? {
        let path: PathBuf = entry?.path();
        if path.extension().is_some_and(|extension| extension == "8") {
            families.extend(names(&fs::read_to_string(path)?).map(str::to_owned));
        }
    }
    Ok(families)
}

/// Checks the expressions, as recording rules. Grafana fills in its variables before.
fn promtool_parses(expressions: &[&str]) -> Result<()> {
    let rules = expressions.iter().enumerate().map(|(at, expression)| {
        let expression = expression
            .replace("$__rate_interval", "5m")
            .replace("$__range", "6h");
        json!({"record": format!("panel:{at}"), "expr": expression})
    });
    let rules: Vec<Value> = rules.collect();
    let folder = harness::scratch()?;
    let file = folder.path().join("rules.yml");
    // JSON is YAML.
    let groups = json!({"groups": [{"name": "dashboard", "rules": rules}]});
    fs::write(&file, groups.to_string())?;
    let mut promtool = Command::new(Path::new(ROOT).join("target/servers/promtool"));
    let checked = promtool.args(["check", "rules"]).arg(&file).output();
    let checked = checked.context("no promtool, which scripts/prerequisites unpacks")?;
    ensure!(checked.status.success(), "{checked:?}");
    Ok(())
}
