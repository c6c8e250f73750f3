//! Tests of [`args`](super).

use super::*;

#[test]
fn the_definition_is_consistent() {
    cli::assert_refuses::<Args>(&["-p 1 --suppressions x 1 1", "-p 1 --why 8 -C"]);
}

#[test]
fn short_flags_cluster_as_in_bcc() {
    let args = Args::try_parse_from(["memleak", "-ap", "12", "10"]).expect("valid");
    assert_eq!(
        (args.interval, args.pid, args.show_allocs, args.count),
        (Some(Duration::from_secs(10)), vec![12], true, None)
    );
}

#[test]
fn a_limit_is_a_percentage() {
    assert_eq!(percent("5%"), Ok(5.0));
    assert_eq!(percent("0.5 %"), Ok(0.5));
    assert_eq!(percent("100"), Ok(100.0));
    for wrong in ["", "%", "-1%", "101%", "5%%", "inf"] {
        assert!(percent(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn wrong_usage_is_refused() {
    for wrong in [
        &["memleak", "-p", "1", "-c", "true"][..],
        &["memleak", "-p", "1", "-s", "0"],
        &["memleak", "-p", "1", "--sample-bytes", "0"],
        &["memleak", "-p", "1", "--sample-bytes", "4G"],
        &["memleak", "-p", "1", "--max-overhead", "0%"],
        &["memleak", "-p", "1", "--max-overhead", "NaN"],
        &["memleak", "-p", "1", "--max-overhead", "5%", "-s", "2"],
        &["memleak", "-p", "0"],
        &["memleak", "-p", "1", "5", "2", "3"],
        &["memleak", "-p", "1", "0"],
        &["memleak", "-p", "1", "--sort", "name"],
        &["memleak", "-p", "1", "--perf-max-stack-depth", "256"],
        &["memleak", "-p", "1", "-f", "-j"],
        &["memleak", "-p", "1", "-f", "--container"],
        &["memleak", "--cache", "filp", "--percpu"],
        &["memleak", "-k=stacks"],
        &["memleak", "--by-cache", "-f"],
        &["memleak", "-p", "1", "--alloc", "server:pool_get"],
        &["memleak", "-p", "1", "--free", "pool_put"],
    ] {
        let error = Args::try_parse_from(wrong).expect_err(&wrong.join(" "));
        assert_eq!(error.exit_code(), 2);
    }
}
