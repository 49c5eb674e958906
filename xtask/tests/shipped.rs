//! The shipped program is the daemon and its tools: what only benches, the simulator and tests need
//! is not among its dependencies.

use std::path::Path;
use std::process::Command;

#[test]
fn shipped_program_depends_on_no_crate_of_the_laboratory() {
    let tree = tree("blkmq");
    assert!(names(&tree, "blkmq-core v"), "{tree}");
    for name in LABORATORY {
        assert!(!names(&tree, name), "blkmq depends on {name}:\n{tree}");
    }
}

#[test]
fn laboratory_depends_on_what_the_shipped_program_must_not() {
    let tree = tree("blkmq-lab");
    for name in ["blkmq-bench", "blkmq-sim", BASELINES] {
        assert!(names(&tree, name), "blkmq-lab does not depend on {name}:\n{tree}");
    }
}

/// Whether a line of the tree begins with this name.
fn names(tree: &str, name: &str) -> bool {
    tree.lines().any(|line| line.starts_with(name))
}

/// A package's dependencies, without those of builds and tests, and their features: a line for each.
fn tree(package: &str) -> String {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["tree", "--locked", "--offline", "--prefix", "none"])
        .args(["-e", "normal,features", "-p", package])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .output()
        .expect("cargo starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo tree -p {package}: {said}");
    String::from_utf8(output.stdout).expect("names are UTF-8")
}

/// Crates and features that only benches, the simulator and tests need.
const LABORATORY: [&str; 7] = [
    "blkmq-bench",
    "blkmq-sim",
    "blkmq-lab",
    "blkmq-torture",
    "blkmq-testkit",
    "proptest",
    BASELINES,
];
/// The algorithms that lost, which benches compare with.
const BASELINES: &str = "blkmq-core feature \"baselines\"";
