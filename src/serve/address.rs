//! Addresses to serve at: a port of this machine alone, or a Unix socket, unless other addresses are allowed.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Shutdown, SockFlag, SockType, UnixAddr, connect, shutdown, socket,
};
use nix::sys::stat::{Mode, umask};

use crate::parse::UsageError;
use crate::print::file_name::FileName;
use crate::print::text;

/// Prefix of a path on the command line, which distinguishes it from an address.
const UNIX: &str = "unix:";

/// Options of tools that serve their reports.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ServeArgs {
    /// Serve the current report over HTTP
    ///
    /// --serve provides a page, a flame graph, profiles as Go programs do, and OpenMetrics. ADDRESS is a port of this
    /// machine (6060, 127.0.0.1:6060), or unix:PATH.
    #[arg(long, value_name = "ADDRESS", value_parser = parse)]
    pub serve: Option<Address>,

    /// Allow --serve on an address that other machines can reach
    #[arg(hide_short_help = true, long, requires = "serve")]
    pub serve_remote: bool,
}

impl ServeArgs {
    /// Begins to listen, before tracing begins, if an address was given.
    ///
    /// # Errors
    /// If the address is in use, or is one that other machines can reach and that is not allowed.
    pub fn listen(&self) -> Result<Option<Listener>> {
        let Some(address) = &self.serve else {
            return Ok(None);
        };
        if let Address::Tcp(tcp) = address
            && !tcp.ip().is_loopback()
            && !self.serve_remote
        {
            let message = format!(
                "--serve {tcp}: other machines can reach this address, and there is no password; add \
                 --serve-remote if they may, or serve at 127.0.0.1:{}",
                tcp.port()
            );
            return Err(UsageError(message).into());
        }
        Listener::bind(address).map(Some)
    }
}

/// An address to serve at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// An IP address and port; port 0 means any free port.
    Tcp(SocketAddr),
    /// A Unix socket's path.
    Unix(PathBuf),
}

/// Prints a URL for TCP, and `unix:` with the path for a Unix socket.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}/"),
            Self::Unix(path) => {
                let path = text::escape_bytes(path.as_os_str().as_encoded_bytes());
                write!(f, "{UNIX}{path}")
            }
        }
    }
}

/// Parses an address: a port of this machine, an IP address with a port, or `unix:PATH`.
///
/// # Errors
/// If the text is no such address. The error is the text for the user.
pub fn parse(argument: &str) -> Result<Address, String> {
    let path = argument.strip_prefix(UNIX);
    if let Some(path) = path.or_else(|| argument.contains('/').then_some(argument)) {
        return if path.is_empty() {
            Err("the path of the socket is missing".into())
        } else {
            Ok(Address::Unix(path.into()))
        };
    }
    let local = |port: u16| Address::Tcp((Ipv4Addr::LOCALHOST, port).into());
    if let Ok(port) = argument.parse() {
        return Ok(local(port));
    }
    let port = argument.strip_prefix("localhost:");
    if let Some(port) = port.and_then(|port| port.parse().ok()) {
        return Ok(local(port));
    }
    argument.parse().map(Address::Tcp).map_err(|_| {
        "must be a port, an address with one such as 127.0.0.1:6060 or [::1]:6060, or unix:PATH"
            .into()
    })
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    /// The address, with the port that was assigned.
    address: Address,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

impl Listener {
    /// Begins to listen at an address. A Unix socket that no server listens at any more is replaced.
    ///
    /// # Errors
    /// If the address is in use, or cannot be listened at.
    pub fn bind(address: &Address) -> Result<Self> {
        let failed = || format!("failed to serve at {address}");
        match address {
            Address::Tcp(tcp) => {
                let listener = TcpListener::bind(tcp).map_err(named).with_context(failed)?;
                let address = Address::Tcp(listener.local_addr().with_context(failed)?);
                let socket = Socket::Tcp(listener);
                Ok(Self { socket, address })
            }
            Address::Unix(path) => {
                let place = FileName::find(path).with_context(failed)?;
                remove_stale_socket(&place).with_context(failed)?;
                // Whoever may write to the socket's file may connect. No other thread can create a file with this
                // umask, as none has been started.
                let before = umask(Mode::from_bits_truncate(0o177));
                let listener = UnixListener::bind(place.path());
                umask(before);
                let listener = listener.map_err(named).with_context(failed)?;
                let file = SocketFile::of(place).with_context(failed)?;
                Ok(Self {
                    socket: Socket::Unix(listener, file),
                    address: address.clone(),
                })
            }
        }
    }

    /// Returns the address at which the socket listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Whether requests must name this machine as their host. Only programs of this machine reach the socket, but a
    /// page on the web can have a browser resolve the page's own name to 127.0.0.1.
    pub(super) fn wants_local_names(&self) -> bool {
        matches!(&self.address, Address::Tcp(address) if address.ip().is_loopback())
    }

    /// Waits for the next client.
    pub(super) fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match &self.socket {
            Socket::Tcp(listener) => Box::new(listener.accept()?.0),
            Socket::Unix(listener, _) => Box::new(listener.accept()?.0),
        })
    }

    /// Stops accepting clients, and removes the socket's file. A thread that waits in [`Listener::accept`] wakes up
    /// with an error.
    pub(super) fn close(&self) {
        let fd: RawFd = match &self.socket {
            Socket::Tcp(listener) => listener.as_raw_fd(),
            Socket::Unix(listener, file) => {
                file.remove();
                listener.as_raw_fd()
            }
        };
        // The only possible failure is that the socket was shut down before.
        let _ = shutdown(fd, Shutdown::Both);
    }
}

/// Adds to an error what to do about it.
fn named(error: io::Error) -> anyhow::Error {
    let in_use = error.kind() == io::ErrorKind::AddrInUse;
    let error = anyhow::Error::from(error);
    if in_use {
        error.context(
            "another program serves there; choose another address, or port 0 for a free one",
        )
    } else {
        error
    }
}

/// Removes a Unix socket's file that a program left behind and that has no listener.
fn remove_stale_socket(place: &FileName) -> Result<()> {
    let Some(there) = place.existing()? else {
        return Ok(());
    };
    if there.st_mode & libc::S_IFMT != libc::S_IFSOCK {
        bail!("it is there, and no socket; name another one");
    }
    let socket = socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )?;
    match connect(socket.as_raw_fd(), &UnixAddr::new(&place.path())?) {
        Err(Errno::ECONNREFUSED) => place.remove().context("failed to remove the old socket"),
        _ => bail!("another program serves there; choose another path"),
    }
}

/// The file of a Unix socket.
#[derive(Debug)]
struct SocketFile {
    place: FileName,
    /// Device and inode: the name can have become another program's file.
    id: (u64, u64),
}

impl SocketFile {
    fn of(place: FileName) -> Result<Self> {
        let id = id(&place)?.context("it was removed at once")?;
        Ok(Self { place, id })
    }

    fn remove(&self) {
        if id(&self.place).is_ok_and(|id| id == Some(self.id)) {
            // If this fails, the next server at this path finds that no server listens, and removes the file.
            let _ = self.place.remove();
        }
    }
}

fn id(place: &FileName) -> Result<Option<(u64, u64)>> {
    let existing = place.existing()?;
    Ok(existing.map(|file| (file.st_dev, file.st_ino)))
}

/// Closes the socket, so that nothing is left however the run ends.
impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
    }
}

/// A connection, over TCP or a Unix socket.
pub(super) trait Stream: io::Read + io::Write + Send {
    /// Sets the time after which reads and writes fail.
    fn limit(&self, time: Duration) -> io::Result<()>;
    /// Tells the client that nothing more comes.
    fn end(&self) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn limit(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }

    fn end(&self) -> io::Result<()> {
        self.shutdown(std::net::Shutdown::Write)
    }
}

impl Stream for UnixStream {
    fn limit(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }

    fn end(&self) -> io::Result<()> {
        self.shutdown(std::net::Shutdown::Write)
    }
}

/// Whether a Host header names this machine itself: `localhost`, or an address of its loopback.
pub(super) fn is_local(host: &str) -> bool {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').unwrap_or((rest, "")),
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let port = port.strip_prefix(':').unwrap_or(port);
    let address = name.parse::<IpAddr>();
    let is_local = address.is_ok_and(|address| address.is_loopback());
    (is_local || name.eq_ignore_ascii_case("localhost")) && port.chars().all(|c| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn tcp(address: &str) -> Result<Address, String> {
        Ok(Address::Tcp(address.parse().expect("an address")))
    }

    #[test]
    fn what_names_no_address_is_of_this_machine() {
        assert_eq!(parse("6060"), tcp("127.0.0.1:6060"));
        assert_eq!(parse("localhost:0"), tcp("127.0.0.1:0"));
        assert_eq!(parse("127.0.0.1:80"), tcp("127.0.0.1:80"));
        assert_eq!(parse("[::1]:80"), tcp("[::1]:80"));
        assert_eq!(parse("0.0.0.0:80"), tcp("0.0.0.0:80"));
        assert_eq!(parse("unix:x"), Ok(Address::Unix("x".into())));
        assert_eq!(parse("/run/x"), Ok(Address::Unix("/run/x".into())));
        for wrong in [
            "",
            "unix:",
            ":80",
            "host:80",
            "127.0.0.1",
            "65536",
            "-1",
            "[::1]",
            "localhost:x",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn other_machines_are_let_in_only_where_that_is_said() {
        for (address, remote, allowed) in [
            ("127.0.0.1:0", false, true),
            ("[::1]:0", false, true),
            ("127.9.9.9:0", false, true),
            ("0.0.0.0:0", false, false),
            ("[::]:0", false, false),
            ("192.0.2.1:0", false, false),
            ("0.0.0.0:0", true, true),
        ] {
            let args = ServeArgs {
                serve: Some(parse(address).expect(address)),
                serve_remote: remote,
            };
            let refused = match args.listen() {
                Ok(_) => false,
                Err(error) => error.is::<UsageError>(),
            };
            assert_eq!(!refused, allowed, "{address}");
        }
    }

    #[test]
    fn only_names_of_this_machine_are_local() {
        for local in [
            "localhost",
            "LocalHost:80",
            "127.0.0.1",
            "127.0.0.1:6060",
            "127.1.2.3:1",
            "[::1]",
            "[::1]:6060",
        ] {
            assert!(is_local(local), "{local}");
        }
        for other in [
            "",
            "example.com",
            "example.com:80",
            "localhost.example.com",
            "127.0.0.1.example.com",
            "192.0.2.1",
            "[::2]",
            "::1",
            "localhost:x",
            "[::1]x",
            "0.0.0.0",
            "evil@localhost",
        ] {
            assert!(!is_local(other), "{other}");
        }
    }

    #[test]
    fn only_a_socket_that_nobody_serves_at_is_replaced() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("x");
        let bind = || Listener::bind(&Address::Unix(path.clone()));
        let first = bind().expect("a socket");
        let second = bind().expect_err("it is in use");
        assert!(
            format!("{second:#}").contains("another program serves there"),
            "{second:#}"
        );
        drop(first);
        assert!(!path.exists(), "it is left");
        // A tool that is killed leaves such a socket.
        drop(UnixListener::bind(&path).expect("a socket"));
        drop(bind().expect("an old socket is replaced"));
        fs::write(&path, "mine").expect("room");
        let error = bind().expect_err("a file");
        assert!(format!("{error:#}").contains("no socket"), "{error:#}");
        assert_eq!(fs::read(&path).expect("a file"), b"mine");
    }

    #[test]
    fn a_file_that_has_become_another_s_is_left() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("x");
        let first = Listener::bind(&Address::Unix(path.clone())).expect("a socket");
        fs::remove_file(&path).expect("it is there");
        fs::write(&path, "mine").expect("room");
        drop(first);
        assert_eq!(fs::read(&path).expect("a file"), b"mine");
    }
}
