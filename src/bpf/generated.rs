//! What libbpf-cargo generates for an object, as a module.

/// Includes what was generated for a BPF object as the module `generated`, with these items in it, too.
#[doc(hidden)]
#[macro_export]
macro_rules! generated {
    ($object:literal $(, $item:item)*) => {
        #[allow(
            missing_docs,
            unreachable_pub,
            dead_code,
            clippy::all,
            clippy::undocumented_unsafe_blocks,
            clippy::unwrap_used,
            reason = "generated code"
        )]
        mod generated {
            include!(concat!(env!("OUT_DIR"), "/", $object, ".skel.rs"));
            $($item)*
        }
    };
}
