//! Requests with which profile stores take a profile.

use std::io::Write;

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::write::GzEncoder;

use crate::export::otlp::{self, Recorded};
use crate::push::queue::Meta;

/// Maximum number of labels; stores refuse profiles with many.
const MAX_LABELS: usize = 12;
/// Maximum length of a label's value, in characters.
const MAX_VALUE: usize = 128;
/// Label with the name of what was traced.
const SERVICE: &str = "service_name";
/// Names of labels as OpenTelemetry's semantic conventions have them. Others keep their names.
const CONVENTIONS: [(&str, &str); 8] = [
    (SERVICE, "service.name"),
    ("host", "host.name"),
    ("namespace", "k8s.namespace.name"),
    ("pod", "k8s.pod.name"),
    ("container", "k8s.container.name"),
    ("container_id", "container.id"),
    ("comm", "process.executable.name"),
    ("pid", "process.pid"),
];

/// Format of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `POST /ingest` of Grafana Pyroscope.
    Pyroscope,
    /// OpenTelemetry's protocol for profiles, which is in development, over HTTP.
    Otlp,
}

impl Format {
    /// Names, as in configurations.
    pub const NAMES: [(&str, Self); 2] = [("pyroscope", Self::Pyroscope), ("otlp", Self::Otlp)];
}

/// Request for one profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Path and query, behind the address of the store.
    pub path: String,
    /// `Content-Type`.
    pub content_type: &'static str,
    /// `Content-Encoding`, if the body is packed.
    pub content_encoding: Option<&'static str>,
    /// Body of the request.
    pub body: Vec<u8>,
}

impl Format {
    /// Makes the request for a profile in pprof's format, packed by gzip.
    ///
    /// # Errors
    /// If the profile cannot be converted.
    pub fn request(self, meta: &Meta, profile: Vec<u8>) -> Result<Request> {
        match self {
            Self::Pyroscope => Ok(Request {
                path: ingest(meta),
                content_type: "application/octet-stream",
                content_encoding: None,
                body: profile,
            }),
            Self::Otlp => {
                let resource: Vec<(String, String)> = labels(meta)
                    .map(|(name, value)| {
                        let known = CONVENTIONS.iter().find(|(ours, _)| *ours == name);
                        (
                            known.map_or(name, |(_, theirs)| *theirs).to_owned(),
                            value.to_owned(),
                        )
                    })
                    .collect();
                let recorded = Recorded {
                    resource: &resource,
                    from_ns: meta.from_seconds * 1_000_000_000,
                    duration_ns: meta.until_seconds.saturating_sub(meta.from_seconds)
                        * 1_000_000_000,
                };
                let mut packed = GzEncoder::new(Vec::new(), Compression::default());
                packed.write_all(&otlp::request(&profile, &recorded)?)?;
                Ok(Request {
                    path: "/v1development/profiles".into(),
                    content_type: "application/x-protobuf",
                    content_encoding: Some("gzip"),
                    body: packed.finish().context("failed to pack a profile")?,
                })
            }
        }
    }
}

fn labels(meta: &Meta) -> impl Iterator<Item = (&str, &str)> {
    let labels = meta.labels.iter().take(MAX_LABELS);
    labels.map(|(name, value)| (&**name, &**value))
}

/// Returns the path and query of Pyroscope's own receiver. The name of the application has the labels.
fn ingest(meta: &Meta) -> String {
    let service = labels(meta).find(|(name, _)| *name == SERVICE);
    let service = plain(service.map_or("unknown", |(_, value)| value));
    let others = labels(meta).filter(|(name, _)| *name != SERVICE);
    let others: Vec<String> = others
        .map(|(name, value)| format!("{}={}", plain(name), plain(value)))
        .collect();
    let name = encoded(&format!("{service}{{{}}}", others.join(",")));
    let Meta {
        from_seconds,
        until_seconds,
        ..
    } = meta;
    format!(
        "/ingest?name={name}&from={from_seconds}&until={until_seconds}&format=pprof&spyName=memagent"
    )
}

/// Replaces the characters that would end a label's value, for which the receiver has no escape, and those that are
/// invisible.
fn plain(value: &str) -> String {
    let allowed = |c: char| c.is_ascii_graphic() && !",{}=".contains(c) || c.is_alphanumeric();
    let plain = value.chars().map(|c| if allowed(c) { c } else { '_' });
    plain.take(MAX_VALUE).collect()
}

/// Encodes a value of a query by percent signs.
fn encoded(value: &str) -> String {
    let mut encoded = String::new();
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_cannot_leave_the_name() {
        let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let meta = Meta {
            labels: vec![
                label("unit", "a,b}{=\n\"x y"),
                label("service_name", "redis{,}"),
                label("pod", "é"),
            ],
            from_seconds: 5,
            until_seconds: 7,
        };
        assert_eq!(
            ingest(&meta),
            "/ingest?name=redis___%7Bunit%3Da_b____%22x_y%2Cpod%3D%C3%A9%7D&from=5&until=7&format=pprof&spyName=memagent"
        );
        let most = Meta {
            labels: (0..40)
                .map(|at| label(&format!("l{at}"), &"x".repeat(200)))
                .collect(),
            ..meta
        };
        let name = ingest(&most);
        assert_eq!(name.matches("%3D").count(), MAX_LABELS);
        assert!(
            name.starts_with("/ingest?name=unknown%7Bl0%3D") && name.len() < MAX_LABELS * 140 + 120
        );
    }
}
