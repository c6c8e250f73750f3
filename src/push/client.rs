//! One request over HTTP or HTTPS, and what its answer means.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use ureq::http::{Response, StatusCode, Uri};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::print::text;
use crate::push::format::Request;

/// Time for a whole exchange.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of an answer, in bytes.
const MAX_ANSWER: u64 = 64 << 10;
/// Length of the part of an answer that is shown.
const SHOWN: usize = 200;
/// Maximum size of a token's file, and of a bundle of certificates.
const MAX_TOKEN: u64 = 64 << 10;
const MAX_BUNDLE: u64 = 8 << 20;
/// Bundles of certificates of distributions.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Store that profiles are pushed to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Store {
    /// Address, such as `https://pyroscope.example:4040`.
    pub url: String,
    /// File with the value of the header Authorization, or the token alone. None for no token.
    pub token_file: Option<PathBuf>,
    /// File with the certificates of authorities. None selects the certificates of the system.
    pub ca_file: Option<PathBuf>,
    /// Value of the header X-Scope-OrgID; empty for none.
    pub tenant: String,
}

/// What became of a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The store has the profile.
    Sent,
    /// The store will never take the profile, for this reason.
    Refused(String),
    /// The profile is to be sent again, after the time that the store has named.
    Again(String, Option<Duration>),
}

/// Connections to a store.
#[derive(Debug)]
pub struct Client {
    store: Store,
    agent: Agent,
}

impl Store {
    /// Checks the address. A token must not be sent over a network as it is.
    ///
    /// # Errors
    /// If the address is none, or has a token but no TLS.
    pub fn check(&self) -> Result<()> {
        let uri: Uri = self.url.parse().context("is no address")?;
        let host = uri.host().context("has no host")?;
        ensure!(
            uri.path_and_query()
                .is_none_or(|path| !path.as_str().contains('?')),
            "must have no query"
        );
        match uri.scheme_str() {
            Some("https") => {}
            Some("http") => {
                let is_local = ["localhost", "127.0.0.1", "[::1]"].contains(&host);
                ensure!(
                    self.token_file.is_none() || is_local,
                    "must begin with https://, so that the token is not readable on the network"
                );
            }
            _ => bail!("must begin with https:// or http://"),
        }
        ensure!(
            self.tenant.bytes().all(|byte| byte.is_ascii_graphic()),
            "the tenant must be of visible ASCII characters"
        );
        Ok(())
    }

    /// Reads the value of the header Authorization.
    fn authorization(&self) -> Result<Option<String>> {
        let Some(path) = &self.token_file else {
            return Ok(None);
        };
        let token = String::from_utf8(read(path, MAX_TOKEN)?).ok();
        let token = token.as_deref().map(str::trim).filter(|token| {
            let is_visible = token
                .bytes()
                .all(|byte| byte.is_ascii_graphic() || byte == b' ');
            !token.is_empty() && is_visible
        });
        let Some(token) = token else {
            bail!("{} has no token of visible ASCII characters", shown(path));
        };
        let has_scheme = ["Bearer ", "Basic "]
            .iter()
            .any(|scheme| token.starts_with(scheme));
        Ok(Some(if has_scheme {
            token.to_owned()
        } else {
            format!("Bearer {token}")
        }))
    }

    /// Reads the certificates of authorities.
    fn certificates(&self) -> Result<Vec<Certificate<'static>>> {
        let bundle = match &self.ca_file {
            Some(path) => path.clone(),
            None => {
                let found = BUNDLES
                    .into_iter()
                    .map(PathBuf::from)
                    .find(|path| path.exists());
                found.context("there are no certificates of authorities: install ca-certificates, or set push.ca_file")?
            }
        };
        let content = read(&bundle, MAX_BUNDLE)?;
        let items = parse_pem(&content).filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        });
        let certificates: Vec<_> = items.collect();
        ensure!(
            !certificates.is_empty(),
            "{} has no certificate",
            shown(&bundle)
        );
        Ok(certificates)
    }
}

impl Client {
    /// Prepares connections to a store. Reads the certificates if the address wants them.
    ///
    /// # Errors
    /// If the address is wrong, or there are no certificates.
    pub fn new(store: Store) -> Result<Self> {
        store
            .check()
            .with_context(|| format!("push.url {}", text::escape(&store.url)))?;
        let mut tls = TlsConfig::builder();
        if store.url.starts_with("https:") {
            // Another provider that was installed is as good.
            let _ = rustls::crypto::ring::default_provider().install_default();
            tls = tls.root_certs(RootCerts::new_with_certs(&store.certificates()?));
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_global(Some(TIMEOUT))
            .proxy(None)
            .tls_config(tls.build())
            .user_agent(concat!("memagent/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(Self {
            store,
            agent: config.new_agent(),
        })
    }

    /// Checks that the store can be reached: that it answers anything at all, by a trusted certificate, and that there is a
    /// token.
    ///
    /// # Errors
    /// If not.
    pub fn reach(&self) -> Result<()> {
        self.store.authorization()?;
        let answered = self.agent.get(&self.store.url).call();
        answered
            .map(drop)
            .map_err(|error| anyhow!(hinted(&error.to_string())))
    }

    /// Sends a request, and reads the answer.
    pub fn send(&self, request: &Request) -> Outcome {
        let answered = self.exchange(request);
        // The reason never has the token: it is in no error.
        answered.unwrap_or_else(|error| Outcome::Again(hinted(&format!("{error:#}")), None))
    }

    fn exchange(&self, request: &Request) -> Result<Outcome> {
        let url = format!("{}{}", self.store.url.trim_end_matches('/'), request.path);
        let mut post = self
            .agent
            .post(&url)
            .header("content-type", request.content_type);
        if let Some(encoding) = request.content_encoding {
            post = post.header("content-encoding", encoding);
        }
        if !self.store.tenant.is_empty() {
            post = post.header("x-scope-orgid", &self.store.tenant);
        }
        if let Some(authorization) = self.store.authorization()? {
            post = post.header("authorization", &authorization);
        }
        let answer = post.send(&request.body[..])?;
        judge(answer)
    }
}

/// Decides what an answer means.
fn judge(mut answer: Response<Body>) -> Result<Outcome> {
    let status = answer.status();
    let wait = answer.headers().get("retry-after");
    let wait = wait.and_then(|wait| wait.to_str().ok()?.trim().parse::<u64>().ok());
    let wait = wait.map(Duration::from_secs);
    let mut body = Vec::new();
    let read = answer
        .body_mut()
        .as_reader()
        .take(MAX_ANSWER + 1)
        .read_to_end(&mut body);
    let said: String = String::from_utf8_lossy(&body).chars().take(SHOWN).collect();
    let said = format!("{status}: {}", text::escape(said.trim()));
    if status.is_success() {
        read.context("the answer is not whole")?;
        ensure!(
            body.len() as u64 <= MAX_ANSWER,
            "the answer is larger than 64 KiB"
        );
        return Ok(match rejected(&body) {
            Some(reason) => Outcome::Refused(reason),
            None => Outcome::Sent,
        });
    }
    Ok(match status {
        // The token may be replaced, and a proxy put in order.
        StatusCode::UNAUTHORIZED
        | StatusCode::FORBIDDEN
        | StatusCode::REQUEST_TIMEOUT
        | StatusCode::TOO_MANY_REQUESTS => Outcome::Again(said, wait),
        status if status.is_client_error() => Outcome::Refused(said),
        _ => Outcome::Again(said, wait),
    })
}

/// Returns the reason why a receiver of OpenTelemetry's protocol has rejected a profile, of a successful answer.
fn rejected(body: &[u8]) -> Option<String> {
    #[derive(Clone, PartialEq, prost::Message)]
    struct Answer {
        #[prost(message, optional, tag = "1")]
        partial: Option<Partial>,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    struct Partial {
        #[prost(int64, tag = "1")]
        rejected: i64,
        #[prost(string, tag = "2")]
        reason: String,
    }
    let answer: Answer = prost::Message::decode(body).ok()?;
    let partial = answer.partial.filter(|partial| partial.rejected > 0)?;
    let reason: String = partial.reason.chars().take(SHOWN).collect();
    Some(format!(
        "{} profiles rejected: {}",
        partial.rejected,
        text::escape(&reason)
    ))
}

/// Adds a remedy to the message of a failed connection.
fn hinted(reason: &str) -> String {
    let reason = text::escape(reason);
    if reason.contains("CaUsedAsEndEntity") {
        format!("{reason}: the server's certificate must be issued by an authority, not be one")
    } else if reason.contains("UnknownIssuer") || reason.contains("BadSignature") {
        format!("{reason}: name the certificate of the server's authority by push.ca_file")
    } else {
        reason.into_owned()
    }
}

/// Reads a file of limited size.
fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let failed = || format!("failed to read {}", shown(path));
    let status = fs::metadata(path).with_context(failed)?;
    ensure!(
        status.is_file() && status.len() <= most,
        "{} is no regular file of at most {}",
        shown(path),
        text::bytes(most)
    );
    fs::read(path).with_context(failed)
}

fn shown(path: &Path) -> String {
    text::escape_bytes(path.as_os_str().as_encoded_bytes())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::thread::{self, JoinHandle};

    use super::*;

    /// Serves one request with an answer, and returns the request's head and body.
    fn serve(answer: Vec<u8>) -> (String, JoinHandle<(String, Vec<u8>)>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/", listener.local_addr().expect("bound"));
        let served = thread::spawn(move || {
            let (stream, _) = listener.accept().expect("a client");
            exchange(stream, &answer).expect("a request")
        });
        (url, served)
    }

    fn exchange(stream: impl Read + Write, answer: &[u8]) -> std::io::Result<(String, Vec<u8>)> {
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        let lower = head.to_ascii_lowercase();
        let length = lower
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |length| length.parse().expect("a number"))];
        reader.read_exact(&mut body)?;
        // The client may have enough.
        let _ = reader.get_mut().write_all(answer);
        let _ = reader.get_mut().flush();
        Ok((head, body))
    }

    /// Authority that issues certificates, or a certificate that it has issued, with its key.
    type Issued = (rcgen::CertificateParams, rcgen::KeyPair, rcgen::Certificate);

    fn authority(name: &str) -> Issued {
        let mut params = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).expect("a name");
        let common = rcgen::DnType::CommonName;
        params.distinguished_name.push(common, name);
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        (params, key, certificate)
    }

    fn issue((authority, of_authority, _): &Issued, name: &str) -> Issued {
        let params = rcgen::CertificateParams::new([name.to_owned()]).expect("a name");
        let key = rcgen::KeyPair::generate().expect("a key");
        let issuer = rcgen::Issuer::from_params(authority, of_authority);
        let certificate = params.signed_by(&key, &issuer).expect("a certificate");
        (params, key, certificate)
    }

    /// Serves a request over TLS with this certificate, and returns its body if there was one.
    fn serve_tls((_, key, certificate): &Issued) -> (String, JoinHandle<Option<Vec<u8>>>) {
        let key = rustls::pki_types::PrivatePkcs8KeyDer::from(key.serialize_der());
        let provider = rustls::crypto::ring::default_provider();
        let config = rustls::ServerConfig::builder_with_provider(provider.into())
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key.into())
            .expect("a key for the certificate");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("https://{}", listener.local_addr().expect("bound"));
        let served = thread::spawn(move || {
            let (stream, _) = listener.accept().expect("a client");
            let connection = rustls::ServerConnection::new(config.into()).expect("a connection");
            let stream = rustls::StreamOwned::new(connection, stream);
            let request = exchange(stream, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
            request.ok().map(|(_, body)| body)
        });
        (url, served)
    }

    #[test]
    fn only_a_server_with_a_trusted_certificate_gets_a_profile() {
        // An authority that was made anew has the name of the old one.
        let (known, twin) = (authority("known"), authority("known"));
        let stranger = authority("stranger");
        let folder = tempfile::tempdir().expect("a directory");
        let ca_file = folder.path().join("ca.pem");
        fs::write(&ca_file, known.2.pem()).expect("a file");
        for (certificate, refused) in [
            (issue(&known, "127.0.0.1"), None),
            (issue(&stranger, "127.0.0.1"), Some("by push.ca_file")),
            (issue(&twin, "127.0.0.1"), Some("by push.ca_file")),
            (issue(&known, "store.example"), Some("not valid for")),
            (known, Some("must be issued by an authority, not be one")),
        ] {
            let (url, served) = serve_tls(&certificate);
            let store = Store {
                url,
                ca_file: Some(ca_file.clone()),
                ..Store::default()
            };
            let outcome = Client::new(store).expect("an address").send(&request());
            let body = served.join().expect("no panic");
            match (refused, outcome) {
                (None, Outcome::Sent) => assert_eq!(body.as_deref(), Some(&b"profile"[..])),
                (Some(reason), Outcome::Again(given, None)) => {
                    assert!(given.contains(reason), "{given}");
                    assert_eq!(body, None, "the profile was sent");
                }
                (_, other) => panic!("{refused:?}: {other:?}"),
            }
        }
    }

    fn request() -> Request {
        Request {
            path: "/ingest?name=x".into(),
            content_type: "application/octet-stream",
            content_encoding: Some("gzip"),
            body: b"profile".to_vec(),
        }
    }

    fn outcome(answer: &[u8]) -> Outcome {
        let (url, served) = serve(answer.to_vec());
        let store = Store {
            url,
            ..Store::default()
        };
        let outcome = Client::new(store).expect("an address").send(&request());
        served.join().expect("no panic");
        outcome
    }

    #[test]
    fn each_answer_has_its_consequence() {
        let again = |answer: &[u8]| match outcome(answer) {
            Outcome::Again(reason, wait) => (reason, wait.map(|wait| wait.as_secs())),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            outcome(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"),
            Outcome::Sent
        );
        let busy = again(b"HTTP/1.1 503 Busy\r\ncontent-length: 7\r\n\r\nlater\x1b!");
        assert!(
            busy.0.starts_with("503 ") && busy.0.contains("later\\x1b!"),
            "{busy:?}"
        );
        assert_eq!(busy.1, None);
        let slow = again(b"HTTP/1.1 429 Slow\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n");
        assert_eq!(slow.1, Some(7));
        let date =
            again(b"HTTP/1.1 429 Slow\r\nretry-after: Fri, 31 Dec\r\ncontent-length: 0\r\n\r\n");
        assert_eq!(date.1, None);
        // A reset in the answer, or in its head, and no HTTP at all.
        let reset = again(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nbroken");
        assert!(reset.0.contains("not whole"), "{reset:?}");
        again(b"HTTP/1.1 20");
        again(b"\x16\x03\x01\x00\x00garbage\r\n\r\n");
        again(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n");
        let refused = outcome(b"HTTP/1.1 422 No\r\ncontent-length: 5\r\n\r\nlabel");
        assert!(
            matches!(&refused, Outcome::Refused(reason) if reason.contains("label")),
            "{refused:?}"
        );
        // 3 profiles rejected, in OpenTelemetry's protocol.
        let partial = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n\x0a\x07\x08\x03\x12\x03bad";
        let rejected = Outcome::Refused("3 profiles rejected: bad".into());
        assert_eq!(outcome(partial), rejected);
    }

    #[test]
    fn an_endless_answer_ends() {
        let mut answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        for _ in 0..1000 {
            answer.extend_from_slice(b"400\r\n");
            answer.extend_from_slice(&[b'x'; 1024]);
            answer.extend_from_slice(b"\r\n");
        }
        let Outcome::Again(reason, None) = outcome(&answer) else {
            panic!("it was taken");
        };
        assert!(reason.contains("larger than 64 KiB"), "{reason}");
    }

    #[test]
    fn the_token_is_read_for_each_request_and_in_no_message() {
        let folder = tempfile::tempdir().expect("a directory");
        let token = folder.path().join("token");
        let mut store = Store {
            token_file: Some(token.clone()),
            tenant: "team-7".into(),
            ..Store::default()
        };
        for (content, sent) in [
            ("secret\n", "authorization: bearer secret\r\n"),
            ("Basic c2VjcmV0", "authorization: basic c2vjcmv0\r\n"),
        ] {
            fs::write(&token, content).expect("a file");
            let (url, served) = serve(b"HTTP/1.1 204 Fine\r\n\r\n".to_vec());
            store.url = url;
            let client = Client::new(store.clone()).expect("an address");
            assert_eq!(client.send(&request()), Outcome::Sent);
            let (head, body) = served.join().expect("no panic");
            let head = head.to_ascii_lowercase();
            assert!(
                head.starts_with("post /ingest?name=x http/1.1\r\n"),
                "{head}"
            );
            for line in [
                sent,
                "x-scope-orgid: team-7\r\n",
                "content-encoding: gzip\r\n",
            ] {
                assert!(head.contains(line), "{line}{head}");
            }
            assert_eq!(body, b"profile");
        }
        for content in ["", "sec\u{1b}ret", "secret\nsecret"] {
            fs::write(&token, content).expect("a file");
            let client = Client::new(store.clone()).expect("an address");
            let Outcome::Again(reason, None) = client.send(&request()) else {
                panic!("{content:?} was sent");
            };
            assert!(
                reason.contains("has no token") && !reason.contains("sec"),
                "{reason}"
            );
        }
        store.url = "http://store.example:4040".into();
        let error = format!("{:#}", Client::new(store).expect_err("no TLS"));
        assert!(error.contains("must begin with https://"), "{error}");
    }
}
