//! Compiles every `bpf/<tool>.bpf.c` and generates its skeleton, `$OUT_DIR/<tool>.skel.rs`,
//! beside the object itself, `$OUT_DIR/<tool>.bpf.o`. `$OUT_DIR/objects.rs` is the list of all
//! objects, for the tests that load each.
//!
//! The package on crates.io has the objects in `bpf/prebuilt/<architecture>` (scripts/crate puts them there), so that
//! it builds without clang. With the feature `build-bpf` the objects are compiled all the same. The repository never
//! has that folder, so that a build there always compiles the C sources.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use libbpf_cargo::SkeletonBuilder;

fn main() -> Result<()> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    // A build script runs in the package's folder. BTF records the file and the text of each source line: relative
    // paths are the same, and found, wherever that folder is.
    let bpf = PathBuf::from("bpf");
    println!("cargo:rerun-if-changed={}", bpf.display());
    println!("cargo:rerun-if-env-changed=CLANG");
    let prebuilt = bpf.join("prebuilt").join(&arch);
    let from_c = env::var_os("CARGO_FEATURE_BUILD_BPF").is_some() || !prebuilt.is_dir();

    let mut sources: Vec<PathBuf> = fs::read_dir(&bpf)
        .context("failed to list bpf/")?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    sources.retain(|path| path.to_string_lossy().ends_with(".bpf.c"));
    sources.push(bpf.join("include/shared.bpf.c"));
    sources.push(bpf.join("include/follow.bpf.c"));
    sources.push(bpf.join("include/page_tables.bpf.c"));

    let mut objects = String::from("&[\n");
    for source in sources {
        let file = source.file_name().unwrap_or_default().to_string_lossy();
        let name = file.trim_end_matches(".bpf.c");
        let object = out.join(format!("{name}.bpf.o"));
        if from_c {
            compile(&source, name, &arch, &object)?;
        } else {
            let ready = prebuilt.join(format!("{name}.bpf.o"));
            fs::copy(&ready, &object).with_context(|| {
                format!(
                    "the package lacks {}; with --features build-bpf, clang makes it",
                    ready.display()
                )
            })?;
        }
        SkeletonBuilder::new()
            .obj(&object)
            .generate(out.join(format!("{name}.skel.rs")))
            .with_context(|| format!("failed to generate the skeleton of {name}"))?;
        // The object `shared` has the types that tools share, and no programs.
        if name != "shared" {
            objects += &format!("    ({name:?}, include_bytes!(\"{name}.bpf.o\")),\n");
        }
    }
    fs::write(out.join("objects.rs"), objects + "]\n").context("failed to list the objects")?;

    // Since 0.189 a static libelf wants zstd, which libbpf-sys does not link.
    if env::var_os("CARGO_FEATURE_STATIC").is_some() {
        println!("cargo:rerun-if-env-changed=LIBBPF_SYS_LIBRARY_PATH");
        let folder = env::var("LIBBPF_SYS_LIBRARY_PATH").unwrap_or_default();
        if folder
            .split(':')
            .any(|folder| PathBuf::from(folder).join("libzstd.a").exists())
        {
            println!("cargo:rustc-link-arg=-l:libzstd.a");
        }
    }
    Ok(())
}

/// Compiles one source file into one object.
fn compile(source: &Path, name: &str, arch: &str, object: &Path) -> Result<()> {
    let bpf = Path::new("bpf");
    // Name of the architecture in bpf_tracing.h.
    let bpf_arch = match arch {
        "x86_64" => "x86",
        "aarch64" => "arm64",
        other => other,
    };
    // memleak's programs use compare-and-exchange, which needs version 3 of the BPF instruction set.
    let cpu = if name == "memleak" { "v3" } else { "v2" };
    SkeletonBuilder::new()
        .source(source)
        .obj(object)
        .clang(env::var("CLANG").unwrap_or_else(|_| "clang".into()))
        .clang_args([
            format!("-D__TARGET_ARCH_{bpf_arch}"),
            format!("-mcpu={cpu}"),
            format!("-I{}", bpf.join("include").display()),
            // Headers of one architecture: arch_*.bpf.h.
            format!("-I{}", bpf.join("include").join(arch).display()),
            format!("-I{}", bpf.join("vmlinux").join(arch).display()),
            "-fdebug-compilation-dir=.".into(),
            // vmlinux.h of 6.18 and later uses tagged anonymous structs.
            "-fms-extensions".into(),
            "-Wno-microsoft-anon-tag".into(),
            "-Wall".into(),
            "-Werror".into(),
        ])
        .build()
        .with_context(|| {
            format!(
                "failed to compile {}; clang 14 or later is needed",
                source.display()
            )
        })
}
