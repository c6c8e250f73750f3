//! Room `serve`: the report of the moment, for browsers and other programs, over HTTP.
//!
//! The thread that traces reads the maps and names the stacks, as for any report; it is woken for
//! that by its [`Poller`](crate::run::poll::Poller), at most once a second however many clients there
//! are. All else is done by other threads: each connection has one, so that a client that hangs holds
//! up itself alone.
//!
//! | module | what it is for |
//! |---|---|
//! | [`address`] | the option and its address: loopback or a Unix socket, unless told otherwise |
//! | [`server`] | connections, each with its thread |
//! | `exchange` | requests for reports, and the reports, between the threads |
//! | `http` | requests, and what is answered to those that are refused |
//! | `pages` | what is where, in which format |
//! | [`report`] | what a report has that is served |
//! | [`trend`] | how stacks have grown |
//! | `html` | the page for people |
//! | [`openmetrics`] | numbers for Prometheus |

pub mod address;
mod exchange;
mod html;
mod http;
pub mod openmetrics;
mod pages;
pub mod report;
pub mod server;
pub mod trend;
