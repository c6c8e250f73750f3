//! What is known of HotSpot's frames on arm64: nothing yet.

/// Reason why no frames of HotSpot are shown.
pub(super) const UNSUPPORTED: Option<&str> = Some("on arm64, whose frames are not supported yet");
