//! Every input of the corpus still passes: on the stable compiler, without libFuzzer.

use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn every_target_passes_its_whole_corpus() {
    for (name, body) in crate::TARGETS {
        let inputs = inputs(name);
        assert!(!inputs.is_empty(), "corpus/{name} has no inputs");
        for path in inputs {
            eprintln!("replay: cargo fuzz run {name} {}", path.display());
            body(&fs::read(&path).expect("a readable input"));
        }
    }
}

#[test]
fn every_target_has_its_entry_for_the_fuzzer() {
    for (name, _) in crate::TARGETS {
        assert!(
            root().join(format!("fuzz_targets/{name}.rs")).is_file(),
            "fuzz_targets/{name}.rs is missing"
        );
    }
    let entries = fs::read_dir(root().join("fuzz_targets")).expect("fuzz_targets/");
    assert_eq!(
        entries.count(),
        crate::TARGETS.len(),
        "fuzz_targets/ and TARGETS differ"
    );
}

fn inputs(name: &str) -> Vec<PathBuf> {
    let directory = root().join("corpus").join(name);
    let entries = fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("a directory entry").path())
        .collect();
    paths.sort();
    paths
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
