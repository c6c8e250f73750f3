//! HTTP server for the current report, or for numbers alone, for browsers and other programs.
//!
//! The thread that traces reads the maps and symbolizes the stacks, as for any report. Its
//! [`Poller`](crate::run::poll::Poller) wakes it for a report at most once per second, however many clients there are.
//! Other threads do all else: each connection has its own thread, so that a client that hangs delays only itself.
//!
//! | module | what it is for |
//! |---|---|
//! | [`address`] | the option and its address: loopback or a Unix socket, by default |
//! | [`server`] | connections, each with its thread |
//! | `exchange` | requests for reports, and the reports, between the threads |
//! | `body` | bodies of responses, and the memory that they may take |
//! | `http` | HTTP requests and responses, also to requests that are refused |
//! | `pages` | which path has what, in which format |
//! | [`report`] | contents of a report that is served |
//! | [`trend`] | growth of stacks |
//! | `html` | the page for people |

pub mod address;
mod body;
mod exchange;
mod html;
mod http;
mod pages;
pub mod report;
pub mod server;
pub mod trend;
