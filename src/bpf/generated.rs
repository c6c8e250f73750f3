//! Macro that includes the code that libbpf-cargo generates for an object, as a module.

/// Includes the code that was generated for a BPF object as the module `generated`, together with these items.
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
