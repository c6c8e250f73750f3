//! Growth of a process over several images: of its blocks by type, and of the whole.
//!
//! One image cannot tell a cache from a leak, or either from data that a program needs. Several images show whether
//! the memory in use grows, by how much a second, whether the growth continues, and whether new blocks stay
//! allocated. Pure functions judge all of this from points, each of which holds the figures of one image:
//!
//! | module | what it judges |
//! |---|---|
//! | [`trend`] | one series of numbers over time |
//! | [`follow`] | blocks from image to image, by type |
//! | [`judge`] | the types, and the process |

pub mod follow;
pub mod judge;
pub mod trend;
