//! Tests that `include/blkmq.h` is what the sources declare. `BLKMQ_WRITE_HEADER=1` writes it instead.

use std::path::Path;

#[test]
fn header_declares_what_the_library_has() {
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = home.join("include/blkmq.h");
    let made = made(home);
    if std::env::var_os("BLKMQ_WRITE_HEADER").is_some() {
        std::fs::write(&path, made).expect("the header can be written");
        return;
    }
    let present = std::fs::read_to_string(&path).expect("the header is there");
    let differ = made
        .lines()
        .zip(present.lines())
        .find(|(made, present)| made != present);
    assert!(
        made == present,
        "{} is not what the sources declare: {differ:?}; run: BLKMQ_WRITE_HEADER=1 cargo test -p blkmq-capi --test header",
        path.display()
    );
}

/// The header that cbindgen makes.
fn made(home: &Path) -> String {
    let config = cbindgen::Config::from_file(home.join("cbindgen.toml")).expect("a configuration");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(home.join("src").join(source));
    }
    let mut text = Vec::new();
    builder
        .generate()
        .expect("sources that can be read")
        .write(&mut text);
    String::from_utf8(text).expect("a text")
}

/// In the order of the header.
const SOURCES: [&str; 5] = [
    "code.rs",
    "sys.rs",
    "sys/engine.rs",
    "sys/disk.rs",
    "sys/queue.rs",
];
