//! What is known of HotSpot's frames on x86-64.

/// Reason why no frames of HotSpot are shown: none.
pub(super) const UNSUPPORTED: Option<&str> = None;
