//! Profiles that wait to be sent, in a [`Spool`], so that they outlive a restart and take no more than a limit.

use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};

use crate::export::spool::Spool;

/// Files of a profile.
const META: &str = "meta.json";
const PROFILE: &str = "profile.pb.gz";
/// Maximum size of the first file, ...
const MAX_META: u64 = 64 << 10;
/// ... and of the second, in bytes.
const MAX_PROFILE: u64 = 16 << 20;

/// What a profile is of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// Labels, by name.
    pub labels: Vec<(String, String)>,
    /// Begin, in seconds since 1970.
    pub from_seconds: u64,
    /// End, in seconds since 1970.
    pub until_seconds: u64,
}

/// Queue on disk.
#[derive(Debug)]
pub struct Queue {
    spool: Spool,
    added: AtomicU32,
}

impl Queue {
    /// Takes the profiles of a directory, with the limits of the queue.
    pub fn new(spool: Spool) -> Self {
        Self {
            spool,
            added: AtomicU32::new(0),
        }
    }

    /// Adds a profile. Returns the number of older ones that were removed for it.
    ///
    /// # Errors
    /// If the profile cannot be written.
    pub fn add(&self, meta: &Meta, profile: &[u8]) -> Result<u64> {
        let number = self.added.fetch_add(1, Ordering::Relaxed);
        let stamp = Timestamp::now().to_zoned(TimeZone::UTC);
        let stamp = stamp.strftime("%Y%m%dT%H%M%SZ");
        let name = format!("{stamp}-{number:08}-{}", std::process::id());
        let meta = serde_json::to_vec(meta).context("failed to write JSON")?;
        self.spool
            .write(&name, &[(META, meta), (PROFILE, profile.to_vec())])
    }

    /// Returns the names of all profiles, the oldest first.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn names(&self) -> Result<Vec<String>> {
        self.spool.written()
    }

    /// Reads a profile.
    ///
    /// # Errors
    /// If the profile is not there any more, or its files are not what [`Queue::add`] writes.
    pub fn read(&self, name: &str) -> Result<(Meta, Vec<u8>)> {
        let meta = self.spool.read(name, META, MAX_META)?;
        let meta = serde_json::from_slice(&meta)
            .with_context(|| format!("{META} of {}/{name} is wrong", self.spool.shown()))?;
        Ok((meta, self.spool.read(name, PROFILE, MAX_PROFILE)?))
    }

    /// Removes a profile, if it is still there.
    ///
    /// # Errors
    /// If the profile cannot be removed.
    pub fn remove(&self, name: &str) -> Result<()> {
        self.spool.remove_written(name)
    }

    /// Returns the bytes of all profiles.
    pub fn bytes(&self) -> u64 {
        self.spool.bytes()
    }
}
