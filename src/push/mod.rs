//! Push of profiles to a profile store: a queue on disk, the stores' formats, and a thread that sends.
//!
//! | module | what it is for |
//! |---|---|
//! | [`queue`] | profiles that wait, on disk, within a limit |
//! | [`format`](mod@format) | requests as the stores want them |
//! | [`client`] | one request over HTTP or HTTPS |
//! | [`sender`] | the thread that sends the oldest profile, and waits longer after each failure |

pub mod client;
pub mod format;
pub mod queue;
pub mod sender;
