//! Growth: what several images of one process tell together, of its blocks by type and of the whole.
//!
//! One image cannot tell a cache from a leak, or either from data that a program needs. Several can: whether the
//! memory in use grows, by how much a second, whether it goes on, and whether new blocks stay. All of this is judged
//! by pure functions over points, each of which is what one image had:
//!
//! | module | what it judges |
//! |---|---|
//! | [`trend`] | one series of numbers over time |
//! | [`follow`] | blocks from image to image, by type |
//! | [`judge`] | the types, and the process |

pub mod follow;
pub mod judge;
pub mod trend;
