//! Paths of the server: those of Go's net/http/pprof, and our own.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::export::exposition::{self, Format};
use crate::serve::body::{Body, BodyMemory, NoBody};
use crate::serve::exchange::Unavailable;
use crate::serve::html;
use crate::serve::http::{Request, Response, Status};
use crate::serve::report::{Content, ServedReport};
use crate::serve::server::{Permit, Shared};

/// Path at which Go programs have their profiles.
const PPROF: &str = "/debug/pprof/";
/// Maximum number of seconds of a difference.
const MAX_SECONDS: u64 = 60;

/// Content security policy of the page: it may load its own frame, and nothing from elsewhere.
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; frame-src 'self'; \
                           base-uri 'none'; form-action 'none'";
/// Content security policy of a flame graph: it may run the script that is in it.
const FLAME_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; \
                            script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";

/// Answers a request.
pub(super) fn answer(request: &Request, shared: &Arc<Shared>) -> Response {
    let answer = match request.path.as_str() {
        "/" => with_report(shared, page),
        "/flame.svg" => with_report(shared, flame),
        "/metrics" => {
            // Both formats are read by those that name none.
            let is_old = request.names_format("text/plain")
                && !request.names_format("application/openmetrics-text");
            let format = if is_old {
                Format::Text
            } else {
                Format::OpenMetrics
            };
            with_numbers(shared, format)
        }
        path => match path.strip_prefix(PPROF) {
            Some("") => Ok(html(Body::message(html::index()))),
            // Go programs distinguish the two by the value that is shown first. Here both have all values that are
            // known.
            Some(name @ ("heap" | "allocs")) => profile(name, request, shared).map_err(as_go),
            Some(_) => Err(as_go(Response::text(Status::NotFound, "Unknown profile"))),
            None => Err(Response::text(
                Status::NotFound,
                "there are /, /flame.svg, /metrics, /debug/pprof/heap and /debug/pprof/allocs",
            )),
        },
    };
    answer.unwrap_or_else(|refused| refused)
}

/// Marks a message so that `go tool pprof` shows it.
fn as_go(mut message: Response) -> Response {
    message.headers.push(("X-Go-Pprof", "1".to_owned()));
    message
}

fn with_report(
    shared: &Shared,
    make: fn(&ServedReport, &Content, &Arc<BodyMemory>) -> Result<Response, NoBody>,
) -> Result<Response, Response> {
    let report = shared.exchange.report().map_err(unavailable)?;
    let content = content(&report)?;
    make(&report, content, &shared.bodies).map_err(no_body)
}

fn with_numbers(shared: &Shared, format: Format) -> Result<Response, Response> {
    let report = shared.exchange.report().map_err(unavailable)?;
    metrics(&report, &shared.bodies, format).map_err(no_body)
}

fn no_body(reason: NoBody) -> Response {
    match reason {
        NoBody::Full => {
            let message = "clients are being sent as much as there is memory for; try again, or raise --mem-limit";
            Response::text(Status::Unavailable, message)
        }
        NoBody::Failed(error) => Response::text(Status::InternalError, &format!("{error:#}")),
    }
}

fn content(report: &ServedReport) -> Result<&Content, Response> {
    let missing = || Response::text(Status::NotFound, "there is /metrics alone");
    report.content.as_ref().ok_or_else(missing)
}

fn unavailable(reason: Unavailable) -> Response {
    let message = match reason {
        Unavailable::Busy => "no report yet; try again",
        Unavailable::Ended => "the trace has ended",
    };
    Response::text(Status::Unavailable, message)
}

fn ok(content_type: &'static str, body: Body) -> Response {
    Response {
        status: Status::Ok,
        content_type,
        headers: Vec::new(),
        body,
    }
}

fn html(page: Body) -> Response {
    Response {
        headers: vec![("Content-Security-Policy", PAGE_POLICY.to_owned())],
        ..ok("text/html; charset=utf-8", page)
    }
}

fn page(
    report: &ServedReport,
    content: &Content,
    bodies: &Arc<BodyMemory>,
) -> Result<Response, NoBody> {
    let page = || bodies.body(|out| Ok(out.write_all(html::page(&content.page).as_bytes())?));
    report.html.get_or_make(page).map(html)
}

fn flame(
    report: &ServedReport,
    content: &Content,
    bodies: &Arc<BodyMemory>,
) -> Result<Response, NoBody> {
    let body = report
        .flame
        .get_or_make(|| bodies.body(|out| content.draw_flame_graph(out)))?;
    Ok(Response {
        headers: vec![("Content-Security-Policy", FLAME_POLICY.to_owned())],
        ..ok("image/svg+xml; charset=utf-8", body)
    })
}

fn metrics(
    report: &ServedReport,
    bodies: &Arc<BodyMemory>,
    format: Format,
) -> Result<Response, NoBody> {
    let cached = match format {
        Format::OpenMetrics => &report.openmetrics,
        Format::Text => &report.prometheus,
    };
    let text = || bodies.body(|out| Ok(exposition::write(&report.families, format, out)?));
    Ok(ok(format.content_type(), cached.get_or_make(text)?))
}

/// Returns a profile, or what was added within some seconds, under the headers that Go programs send.
fn profile(name: &str, request: &Request, shared: &Arc<Shared>) -> Result<Response, Response> {
    let debug = request.parameter("debug").unwrap_or_default();
    let debug = debug.parse::<i64>().is_ok_and(|debug| debug != 0);
    let seconds = request.parameter("seconds").filter(|text| !text.is_empty());
    if debug {
        return match seconds {
            None => with_report(shared, text),
            // The text of the error is Go's.
            Some(_) => Err(Response::text(
                Status::BadRequest,
                "seconds and debug params are incompatible",
            )),
        };
    }
    let (body, name) = match seconds {
        None => {
            let report = shared.exchange.report().map_err(unavailable)?;
            let content = content(&report)?;
            let pprof = || shared.bodies.body(|out| content.encoded.write(out));
            let body = report.pprof.get_or_make(pprof).map_err(no_body)?;
            (body, name.to_owned())
        }
        Some(seconds) => (difference(seconds, shared)?, format!("{name}-delta")),
    };
    let disposition = format!("attachment; filename=\"{name}\"");
    Ok(Response {
        headers: vec![("Content-Disposition", disposition)],
        ..ok("application/octet-stream", body)
    })
}

/// Returns the profile as text, for people.
fn text(
    report: &ServedReport,
    content: &Content,
    bodies: &Arc<BodyMemory>,
) -> Result<Response, NoBody> {
    let text = || bodies.body(|out| content.encoded.write_text(out).map(drop));
    let body = report.text.get_or_make(text)?;
    // What has a text form has at least one line.
    Ok(match body.bytes() {
        [] => Response::text(
            Status::NotImplemented,
            "this profile has no text form: omit ?debug",
        ),
        _ => ok("text/plain; charset=utf-8", body),
    })
}

/// Returns the profile of what is added within this number of seconds from now on.
fn difference(seconds: &str, shared: &Arc<Shared>) -> Result<Body, Response> {
    let seconds = match seconds.parse() {
        Ok(seconds @ 1..=MAX_SECONDS) => Duration::from_secs(seconds),
        _ => {
            let message = format!("seconds: must be a whole number from 1 to {MAX_SECONDS}");
            return Err(Response::text(Status::BadRequest, &message));
        }
    };
    if !shared.differences.try_acquire() {
        let message = "too many wait for a difference (seconds); try again";
        return Err(Response::text(Status::Unavailable, message));
    }
    let _slot = Permit::of(shared, |shared| &shared.differences);
    let exchange = &shared.exchange;
    // An older report is no start: what was added between it and now would be counted, too.
    let (earlier, begun) = exchange
        .report_from(Some(Instant::now()))
        .map_err(unavailable)?;
    let until = begun + seconds;
    exchange.pause(until).map_err(unavailable)?;
    let (later, _) = exchange.report_from(Some(until)).map_err(unavailable)?;
    let (earlier, later) = (content(&earlier)?, content(&later)?);
    let difference = |out: &mut dyn Write| later.encoded.since(&earlier.encoded).write(out);
    shared.bodies.body(difference).map_err(no_body)
}
