//! Tests of demangling, most of which compare with c++filt.

use std::io::Write as _;
use std::process::{Command, Stdio};

use proptest::prelude::*;

use super::*;

#[test]
fn names_as_in_the_source() {
    assert_eq!(demangle("_ZN3foo3barEi"), "foo::bar(int)");
    assert_eq!(demangle("_RNvC6_123foo3bar"), "123foo::bar");
    assert_eq!(
        demangle("_ZN12_GLOBAL__N_15cacheE"),
        "(anonymous namespace)::cache"
    );
    assert_eq!(
        demangle("_ZN4core3fmt5Write9write_str17h0123456789abcdefE"),
        "core::fmt::Write::write_str"
    );
    // Names of D and of Swift stay as they are.
    let others = ["_D3std5stdio6File5closeMFNeZv", "$s4main5OrderC4loadyySiF"];
    for plain in ["malloc", "_Z", "_ZN", "_start", "", "größe"]
        .into_iter()
        .chain(others)
    {
        assert_eq!(demangle(plain), plain);
    }
}

/// Makes a mangled name in which each parameter's type is made of two of the one before it.
fn bomb(parameters: usize) -> String {
    let reference = |number: usize| match number {
        0 => "S_".to_owned(),
        _ => {
            const DIGITS: &[u8; 36] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";
            let (mut rest, mut digits) = (number - 1, Vec::new());
            loop {
                digits.insert(0, char::from(DIGITS[rest % 36]));
                rest /= 36;
                if rest == 0 {
                    return format!("S{}_", digits.iter().collect::<String>());
                }
            }
        }
    };
    let types = (0..parameters).map(|number| {
        let last = reference(number + 1);
        format!("S_I{last}{last}E")
    });
    format!("_Z1f1XIiiE{}", types.collect::<String>())
}

#[test]
fn a_bomb_is_cut() {
    // The prefix shows that the name was parsed.
    assert_eq!(
        demangle(&bomb(1)),
        "f(X<int, int>, X<X<int, int>, X<int, int> >)"
    );
    let cut = demangle(&bomb(64)).into_owned();
    assert!(cut.starts_with("f(X<int, int>, X<X<int"), "{cut}");
    assert!(
        (MAX_NAME..=2 * MAX_NAME).contains(&cut.len()),
        "{}",
        cut.len()
    );
}

/// Returns what c++filt makes of names.
fn filtered(names: &[&str]) -> Vec<String> {
    let mut filter = Command::new("c++filt")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("binutils is installed");
    let mut stdin = filter.stdin.take().expect("a pipe");
    let lines = names.join("\n");
    let writer = std::thread::spawn(move || stdin.write_all(lines.as_bytes()));
    let output = filter.wait_with_output().expect("c++filt ends");
    writer.join().expect("no panic").expect("c++filt reads");
    let text = String::from_utf8(output.stdout).expect("text");
    text.lines().map(str::to_owned).collect()
}

/// Returns the text of a name as far as both sides show it.
fn shown(name: &str) -> &str {
    text::truncate(name, MAX_NAME)
}

/// Returns the names of C++ that a library exports or imports.
fn names_of_library(file: &str) -> Vec<String> {
    let symbols = Command::new("nm")
        .args(["-D", "--format=posix", "--without-symbol-versions", file])
        .output()
        .expect("binutils is installed");
    let symbols = String::from_utf8(symbols.stdout).expect("text");
    let names = symbols.lines().filter_map(|line| line.split(' ').next());
    let names = names.filter(|name| name.starts_with("_Z"));
    names.map(str::to_owned).collect()
}

/// The libraries of the compiler that builds BPF programs: libstdc++, LLVM's and Clang's.
#[test]
fn libraries_as_cxxfilt_has_them() {
    let clang = Command::new("sh")
        .args(["-c", "ldd \"$(command -v clang)\""])
        .output()
        .expect("a shell");
    let libraries = String::from_utf8(clang.stdout).expect("text");
    let files = libraries.lines().filter_map(|line| {
        let (_, file) = line.split_once(" => ")?;
        file.split(' ').next()
    });
    let names: Vec<String> = files.flat_map(names_of_library).collect();
    if names.is_empty() {
        eprintln!("not run: clang is not installed, or static");
        return;
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    assert!(names.len() > 4999, "{} names", names.len());
    let different: Vec<_> = names
        .iter()
        .zip(filtered(&names))
        .filter(|(name, wanted)| shown(&demangle(name)) != shown(wanted))
        .collect();
    assert!(different.len() * 10_000 <= names.len(), "{different:#?}");
}

/// Names of many kinds, as GCC and Clang mangle them.
const KINDS: &[&str] = &[
    "_ZGIW3std",
    "_ZGIW3stdW6compatWP4part",
    // std::make_shared and std::make_unique, with and without arguments
    "_ZSt11make_sharedINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEJRA2_KcEESt10shared_ptrINSt9enable_ifIXntsrSt8is_arrayIT_E5valueES9_E4typeEEDpOT0_",
    "_ZSt11make_uniqueI5ShapeJEENSt8__detail9_MakeUniqIT_E15__single_objectEDpOT0_",
    // generic lambda expressions, and those with template parameters
    "_ZZ4mainENKUlT_E_clIiEEDaS_",
    "_ZZN7company3runEvENKUlOT_DpOT0_E2_clIiJcdEEEDaS1_S4_",
    "_ZZ4mainENKUlTyT_E_clIiEEDaS_",
    "_ZZ1fvENKUlTyTniTpTyvE_clEv",
    // conversions, constructors, destructors and operators
    "_ZN1AcvT_IiEEv",
    "_ZN1AcvPT_IiEEv",
    "_ZNSsC1Ev",
    "_ZN1AIiED2Ev",
    "_ZlsIiEvT_",
    "_Zli2_xy",
    "_ZN1AnwEm",
    // functions that return pointers to functions, arrays, members
    "_Z1fIiEPFvcET_",
    "_Z1fIiERA5_iv",
    "_Z1fPFPFvcEiE",
    "_Z1fPA5_PFvvE",
    "_Z1fM1AKFvcE",
    "_Z1fDoFvvE",
    "_ZNKR1A1fEv",
    // references to references, qualifiers
    "_Z1fIRiEvOT_",
    "_Z1fIKiEvRKT_",
    "_Z1fPKPVKi",
    // packs
    "_Z1fIiJEEvDpT0_",
    "_Z1fIJijEEvDpOT_",
    "_Z1fIJSaIiEJEEEvv",
    // local names, and names of the compiler
    "_ZZ1fvEs",
    "_ZZ1fvE1x_0",
    "_ZZ1fvEd_NKUlvE_clEv",
    "_ZTC1A0_1B",
    "_ZTv0_n12_N1A1fEv",
    "_ZGVZ1fvE1x",
    "_Z1fv.constprop.0.isra.0",
    "_GLOBAL__I__Z3foov",
    "_ZN1aB5cxx11E",
    "_ZNDC1a1bEE",
    // literals and expressions
    "_Z1fILi5ELj5ELb1ELc97ELn5ELin5ELd40000000EEvv",
    "_Z1fIXadL_ZN1A1gEvEEEvv",
    "_Z1fIXgtLi1ELi2EEEvv",
    "_Z1fIiJiiEEDTcl1gspclsr3stdE7forwardIT0_Efp0_EEET_DpS0_",
    "_Z1fIJiiEEDTfLplLi0ET_EDpS0_",
    "_Z1fIiEDTnw_T_piLi1EEES0_",
    "_Z1fIiEDTsrSt7is_voidIT_E5valueEv",
    "_ZN1A1fIiEENSt9enable_ifIXsr3std9is_signedIT_EE5valueES2_E4typeEv",
    "_Z1fIiEDTqufp_Li1ELi2EET_",
];

#[test]
fn kinds_as_cxxfilt_has_them() {
    let all = filtered(KINDS);
    assert_eq!(all.len(), KINDS.len());
    for (name, wanted) in KINDS.iter().zip(all) {
        assert_eq!(demangle(name), *wanted, "{name}");
        assert_ne!(*name, wanted);
    }
}

#[test]
fn an_empty_pack_leaves_no_comma() {
    // c++filt writes `f(int, , char)`.
    assert_eq!(demangle("_Z1fIJEEviDpT_c"), "void f<>(int, char)");
    assert_eq!(demangle("_Z1fIJEiEvv"), "void f<int>()");
}

#[test]
fn a_name_that_writes_nothing_ends() {
    // Each parameter is a list of two of the one before it, and the first list is empty.
    let mut name = "_Z1fI".to_owned();
    name.push_str("1XIJEE");
    for _ in 0..60 {
        name.push_str("JDpT_DpT_E");
    }
    name.push_str("EvDpT_DpT0_DpT1_");
    let start = std::time::Instant::now();
    let _ = demangle(&name);
    assert!(start.elapsed().as_secs() < 2, "{:?}", start.elapsed());
}

/// Parts of mangled names.
const PARTS: &[&str] = &[
    "N",
    "E",
    "I",
    "J",
    "Dp",
    "T_",
    "T0_",
    "S_",
    "S0_",
    "S1_",
    "St",
    "Sa",
    "Ss",
    "Ul",
    "Ut_",
    "E_",
    "E0_",
    "cv",
    "X",
    "sr",
    "srN",
    "L",
    "_Z",
    "1a",
    "3foo",
    "C1",
    "D0",
    "K",
    "P",
    "R",
    "O",
    "F",
    "M",
    "A5_",
    "A_",
    "v",
    "i",
    "Li5",
    "fp_",
    "fL0p_",
    "cl",
    "pl",
    "ad",
    "dt",
    "qu",
    "nw",
    "_",
    "sZ",
    "sp",
    "fr",
    "fL",
    "DT",
    "Do",
    "Z",
    "Zd_",
    "B",
    "Ty",
    "Tn",
    "Tp",
    "DC",
    "TV",
    "GR",
    "Th0_",
    ".cold",
    "\u{e9}",
    "3\u{e9}a",
    "99999999999999999999",
    "0",
    "n",
    "U",
    "u",
    "on",
    "il",
    "tl",
    "M",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_parts_end_in_time(parts in proptest::collection::vec(proptest::sample::select(PARTS), 0..400)) {
        let name = format!("_Z{}", parts.concat());
        let start = std::time::Instant::now();
        let demangled = demangle(&name);
        prop_assert!(start.elapsed().as_secs() < 2);
        prop_assert!(demangled.len() <= name.len().max(2 * MAX_NAME));
    }

    #[test]
    fn any_repeated_part_ends_in_time(part in proptest::collection::vec(proptest::sample::select(PARTS), 1..4), times in 1..3000_usize) {
        let start = std::time::Instant::now();
        let _ = demangle(&format!("_Z1fI{}", part.concat().repeat(times)));
        let _ = demangle(&format!("_Z{}", part.concat().repeat(times)));
        prop_assert!(start.elapsed().as_secs() < 2);
    }

    #[test]
    fn any_damaged_name_ends_in_time(kind in proptest::sample::select(KINDS), at in 0..100_usize, part in proptest::sample::select(PARTS)) {
        let mut name = kind.to_owned();
        name.insert_str(at.min(name.len()), part);
        let start = std::time::Instant::now();
        let _ = demangle(&name);
        prop_assert!(start.elapsed().as_secs() < 2);
    }
}
