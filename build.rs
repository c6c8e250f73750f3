//! Compiles every `bpf/<tool>.bpf.c` and generates its skeleton, `$OUT_DIR/<tool>.skel.rs`,
//! beside the object itself, `$OUT_DIR/<tool>.bpf.o`. `$OUT_DIR/objects.rs` is the list of all
//! objects, for the tests that load each.
//!
//! The package on crates.io has the objects in `bpf/prebuilt/<architecture>` (scripts/crate puts them there), so that
//! it builds without clang. With the feature `build-bpf` the objects are compiled all the same. The repository never
//! has that directory, so that a build there always compiles the C sources.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use libbpf_cargo::SkeletonBuilder;

fn main() -> Result<()> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    // A build script runs in the package's directory. BTF records the file and the text of each source line: relative
    // paths are the same, and found, wherever that directory is.
    let bpf = PathBuf::from("bpf");
    println!("cargo:rerun-if-changed={}", bpf.display());
    println!("cargo:rerun-if-env-changed=CLANG");
    let prebuilt = bpf.join("prebuilt").join(&arch);
    let origin = if env::var_os("CARGO_FEATURE_BUILD_BPF").is_some() || !prebuilt.is_dir() {
        Origin::Sources(Clang::find(&arch)?)
    } else {
        Origin::Prebuilt(prebuilt)
    };

    let mut sources: Vec<PathBuf> = fs::read_dir(&bpf)
        .context("failed to list bpf/")?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    sources.retain(|path| path.to_string_lossy().ends_with(".bpf.c"));
    sources.push(bpf.join("include/shared.bpf.c"));
    sources.push(bpf.join("include/follow.bpf.c"));
    sources.push(bpf.join("include/page_tables.bpf.c"));
    sources.sort();

    make_all(&sources, &out, &origin)?;

    let mut objects = String::from("&[\n");
    for name in sources.iter().map(|source| object_name(source)) {
        // The object `shared` has the types that tools share, and no programs.
        if name != "shared" {
            objects += &format!("    ({name:?}, include_bytes!(\"{name}.bpf.o\")),\n");
        }
    }
    fs::write(out.join("objects.rs"), objects + "]\n").context("failed to list the objects")?;
    Ok(())
}

/// Where objects come from.
enum Origin {
    Sources(Clang),
    /// The directory of the package on crates.io that has the compiled objects.
    Prebuilt(PathBuf),
}

/// The compiler, and the arguments that it gets for every source.
struct Clang {
    program: String,
    /// What `clang --version` prints: another compiler makes other objects.
    version: String,
    args: Vec<String>,
    is_arm64: bool,
}

/// Returns the name of the object that `source` is compiled into.
fn object_name(source: &Path) -> String {
    let file = source.file_name().unwrap_or_default().to_string_lossy();
    file.trim_end_matches(".bpf.c").to_owned()
}

/// Makes the objects and skeletons of all `sources` in the directory `out`, one thread for each CPU.
fn make_all(sources: &[PathBuf], out: &Path, origin: &Origin) -> Result<()> {
    let rest = Mutex::new(sources.iter());
    let next = || rest.lock().ok().and_then(|mut rest| rest.next());
    let work = || -> Result<()> {
        while let Some(source) = next() {
            make(source, out, origin)?;
        }
        Ok(())
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .map_err(|_| anyhow!("a thread of build.rs panicked"))?
        })
    })
}

/// Makes one object and its skeleton, unless both are there and everything that they were made from is unchanged.
///
/// Cargo compares times of files, and runs the whole build script if one file under bpf/ is newer.
fn make(source: &Path, out: &Path, origin: &Origin) -> Result<()> {
    let name = object_name(source);
    let object = out.join(format!("{name}.bpf.o"));
    let inputs = out.join(format!("{name}.bpf.d"));
    let stamp = out.join(format!("{name}.stamp"));
    match origin {
        Origin::Prebuilt(folder) => {
            let ready = folder.join(format!("{name}.bpf.o"));
            fs::copy(&ready, &object).with_context(|| {
                format!(
                    "the package lacks {}; with --features build-bpf, clang makes it",
                    ready.display()
                )
            })?;
        }
        Origin::Sources(clang) => {
            let made = fs::read_to_string(&stamp).ok();
            if made.is_some() && made == clang.stamp(&inputs) {
                return Ok(());
            }
            let _ = fs::remove_file(&stamp);
            clang.compile(source, &name, &object, &inputs)?;
        }
    }
    let skeleton = out.join(format!("{name}.skel.rs"));
    generate(&object, &skeleton)
        .with_context(|| format!("failed to generate the skeleton of {name}"))?;
    if let Origin::Sources(clang) = origin
        && let Some(made) = clang.stamp(&inputs)
    {
        fs::write(&stamp, made).context("failed to record what an object was made from")?;
    }
    Ok(())
}

/// Generates the skeleton of an object, which refers to the object: as an array literal the object is a megabyte of
/// source code, which takes rustc and rustfmt longer than all other code of the skeleton.
///
/// Two things that the generator writes are replaced:
/// - The object's whole path. A binary has a checksum of each source file, so that the path would give the same sources
///   other bytes in another directory. The name alone is relative to the skeleton.
/// - The section, which is the same for all objects. A linker keeps or drops a section as a whole, so that a tool would
///   also carry each object that rustc has compiled together with one that the tool uses.
fn generate(object: &Path, skeleton: &Path) -> Result<()> {
    const SECTION: &str = ".bpf.objs";
    SkeletonBuilder::new()
        .obj(object)
        .reference_obj(true)
        .rustfmt("no-rustfmt")
        .generate(skeleton)?;
    let name = object.file_name().context("the object has no name")?;
    let own_section = format!("{SECTION}.{}", name.display());
    let mut text = fs::read_to_string(skeleton)?;
    for (generated, ours) in [
        (format!("{object:?}"), format!("{name:?}")),
        (format!("{SECTION:?}"), format!("{own_section:?}")),
    ] {
        ensure!(
            text.matches(&generated).count() == 1,
            "the generator writes {generated} in another way"
        );
        text = text.replace(&generated, &ours);
    }
    fs::write(skeleton, text)?;
    Ok(())
}

impl Clang {
    /// Returns the compiler that the environment variable CLANG names, else `clang`.
    fn find(arch: &str) -> Result<Self> {
        let program = env::var("CLANG").unwrap_or_else(|_| "clang".into());
        let printed = Command::new(&program)
            .arg("--version")
            .output()
            .with_context(|| {
                format!("cannot run {program}; install clang 14 or later, or set CLANG")
            })?;
        let bpf = Path::new("bpf");
        // Name of the architecture in bpf_tracing.h.
        let bpf_arch = match arch {
            "x86_64" => "x86",
            "aarch64" => "arm64",
            other => other,
        };
        let mut args = vec![
            format!("-D__TARGET_ARCH_{bpf_arch}"),
            format!("-I{}", bpf.join("include").display()),
            // Headers of one architecture: arch_*.bpf.h.
            format!("-I{}", bpf.join("include").join(arch).display()),
            format!("-I{}", bpf.join("vmlinux").join(arch).display()),
            "-fdebug-compilation-dir=.".into(),
            // vmlinux.h of 6.18 and later uses tagged anonymous structs.
            "-fms-extensions".into(),
            "-Wno-microsoft-anon-tag".into(),
            "-Wall".into(),
        ];
        // A later clang warns of more, and must not break the build of a user.
        println!("cargo:rerun-if-env-changed=CI");
        if env::var_os("CI").is_some() {
            args.push("-Werror".into());
        }
        Ok(Self {
            program,
            version: String::from_utf8_lossy(&printed.stdout).into_owned(),
            args,
            is_arm64: arch == "aarch64",
        })
    }

    /// Compiles one source file into one object, and lists the files that it was made from in `inputs`.
    fn compile(&self, source: &Path, name: &str, object: &Path, inputs: &Path) -> Result<()> {
        // memleak's programs use compare-and-exchange, which needs version 3 of the BPF instruction set. On arm64 all
        // programs with stacks use atomic operations that order others (arch_order.bpf.h).
        let cpu = if name == "memleak" || self.is_arm64 {
            "v3"
        } else {
            "v2"
        };
        let mut args = self.args.clone();
        args.push(format!("-mcpu={cpu}"));
        args.extend([
            "-MD".into(),
            "-MF".into(),
            inputs.to_string_lossy().into_owned(),
        ]);
        SkeletonBuilder::new()
            .source(source)
            .obj(object)
            .clang(&self.program)
            .clang_args(args)
            .build()
            .with_context(|| {
                format!(
                    "failed to compile {}; clang 14 or later is needed",
                    source.display()
                )
            })
    }

    /// Returns a hash of the compiler, its arguments, this build script, the locked dependencies, and the files under
    /// bpf/ that `inputs` lists; None if one of them cannot be read.
    fn stamp(&self, inputs: &Path) -> Option<String> {
        let mut hash = DefaultHasher::new();
        (&self.program, &self.version, &self.args).hash(&mut hash);
        // Cargo.lock has the version of libbpf, whose headers are in a new temporary directory each time.
        for file in ["build.rs", "Cargo.lock"] {
            fs::read(file).ok()?.hash(&mut hash);
        }
        // The rule of a Makefile: the object, a colon, and all files that were read.
        let rule = fs::read_to_string(inputs).ok()?;
        for file in rule
            .split_whitespace()
            .filter(|word| word.starts_with("bpf/"))
        {
            fs::read(file).ok()?.hash(&mut hash);
        }
        Some(format!("{:016x}", hash.finish()))
    }
}
