use super::*;

fn frame(symbol: Option<&str>, module: Option<&str>) -> Frame {
    Frame {
        address: 0x1234,
        symbol: symbol.map(|name| (name.into(), 0x1d)),
        module: module.map(|name| (name.into(), 0x34)),
        kind: match module {
            Some("kernel") => FrameKind::Kernel,
            _ => FrameKind::Native,
        },
        ..Frame::default()
    }
}

#[test]
fn frames_print_as_bcc_prints_them() {
    let text = |symbol, module| frame(symbol, module).to_string();
    assert_eq!(text(Some("f"), Some("libf.so")), "f+0x1d [libf.so]");
    assert_eq!(text(Some("jit"), None), "jit+0x1d");
    assert_eq!(text(None, Some("libf.so")), "libf.so+0x34 [libf.so]");
    assert_eq!(text(None, None), "[unknown]");
    let mut python = Frame::of_python(0, "Order.load", None);
    assert_eq!(python.to_string(), "Order.load [python]");
    python = Frame::of_python(1 << 63, "Order.load", Some(("/srv/orders.py", Some(41))));
    assert_eq!(python.to_string(), "Order.load (orders.py:41) [python]");
    assert_eq!(python.function_or_module(), "Order.load (orders.py:41)");
    let json = serde_json::to_string(&python).expect("JSON");
    assert_eq!(
        json,
        "{\"kind\":\"python\",\"address\":\"0x8000000000000000\",\"symbol\":\"Order.load\",\"offset\":null,\
         \"module\":null,\"module_offset\":null,\"file\":\"/srv/orders.py\",\"line\":41}"
    );
}

#[test]
fn a_function_of_java_has_its_line_in_reports_and_none_in_its_name() {
    let line = |line| SourceLine {
        function: Some("void Orders.load(int)".to_owned()),
        file: Some("Orders.java".to_owned()),
        line,
    };
    let frame = Frame::of_java(0x1238, Some(line(41)));
    assert_eq!(
        frame.to_string(),
        "void Orders.load(int) (Orders.java:41) [java]"
    );
    assert_eq!(frame.function_or_module(), "void Orders.load(int)");
    let json = serde_json::to_value(&frame).expect("JSON");
    assert_eq!(
        (&json["file"], &json["line"]),
        (&"Orders.java".into(), &41.into())
    );
    let without = Frame::of_java(0x1238, Some(line(0)));
    assert_eq!(without.to_string(), "void Orders.load(int) [java]");
    let unknown = Frame::of_java(0x1238, None);
    assert_eq!(unknown.to_string(), "[interpreted] [java]");
}

#[test]
fn our_own_frames_are_left_out_and_others_of_such_names_are_not() {
    let names = |frames: &[(&str, &str)]| -> Vec<String> {
        let frames = frames.iter().map(|&(name, of)| frame(Some(name), Some(of)));
        let part = Part {
            frames: frames.collect(),
            truncated: None,
        };
        let frames = part.without_tracer().frames.into_iter();
        frames
            .filter_map(|frame| Some(frame.symbol?.0.to_string()))
            .collect()
    };
    let traced = [
        ("bpf_prog_1234_direct_end", "kernel"),
        ("bpf_trace_run1", "kernel"),
        ("try_to_free_pages", "kernel"),
        ("bpf_prog_run_pin_on_cpu", "kernel"),
    ];
    assert_eq!(
        names(&traced),
        ["try_to_free_pages", "bpf_prog_run_pin_on_cpu"]
    );
    assert_eq!(names(&[("bpf_prog_load", "libbpf.so")]), ["bpf_prog_load"]);
}
