//! Tests of programs in C, C++ and Python that use the library as anybody's would.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use blkmq_testkit::{Scratch, skip};

#[test]
fn example_is_c_and_cxx_for_every_compiler_and_shares_by_weight() {
    for compiler in [c("gcc"), c("clang"), cxx("g++"), cxx("clang++")]
        .into_iter()
        .flatten()
    {
        let program = compiler.build(&home().join("examples/two_tenants.c"), &["-O2"]);
        let share = || {
            let said = run(program.command().arg("2"));
            assert!(said.contains("flush of /three: no error"), "{said}");
            let json = said.lines().find(|line| line.starts_with('{'));
            let json = json.expect("statistics");
            let json: serde_json::Value = serde_json::from_str(json).expect("JSON");
            let ios = |group: &str| json["groups"][group]["read"]["ios"].as_f64().expect("a number");
            ios("/three") / (ios("/one") + ios("/three"))
        };
        // Equal shares would be 0.5, each time. The drive is slow, so that a busy machine mostly keeps it busy, too.
        let shares: Vec<f64> = (0..4)
            .map(|_| share())
            .take_while(|share| !(0.65..0.85).contains(share))
            .collect();
        assert!(shares.len() < 4, "weight 300 beside 100 got {shares:?}");
    }
}

#[test]
fn faults_are_told_by_codes_and_texts() {
    for compiler in [c("gcc"), c("clang")].into_iter().flatten() {
        run(&mut compiler
            .build(&home().join("tests/programs/faults.c"), &["-O2"])
            .command());
    }
}

#[test]
fn faults_leave_nothing_behind_under_address_sanitizer() {
    let Some(compiler) = c("gcc") else { return };
    let flags = ["-g", "-fsanitize=address,undefined"];
    for source in ["tests/programs/faults.c", "examples/two_tenants.c"] {
        run(&mut compiler.build(&home().join(source), &flags).command());
    }
}

#[test]
fn static_library_is_enough() {
    let Some(compiler) = c("gcc") else { return };
    let program = compiler.build_static(&home().join("tests/programs/faults.c"));
    run(&mut program.command());
}

#[test]
fn installed_library_is_found_by_pkg_config_and_by_its_soname() {
    let Some(compiler) = c("gcc") else { return };
    let scratch = Scratch::new();
    let root = scratch.dir().to_str().expect("a path in UTF-8");
    let mut install = Command::new(home().join("install.sh"));
    run(install
        .args(["--prefix", "/opt/b", "--from"])
        .arg(libraries())
        .env("DESTDIR", root));
    let lib = format!("{root}/opt/b/lib");
    let ask = |words: &[&str]| {
        let mut command = Command::new("pkg-config");
        let command = command.args(words).arg("blkmq");
        command.env("PKG_CONFIG_PATH", format!("{lib}/pkgconfig"));
        command.env("PKG_CONFIG_SYSROOT_DIR", root).output()
    };
    let Ok(version) = ask(&["--modversion"]) else {
        return skip("pkg-config is not installed");
    };
    let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
    assert_eq!(version, env!("CARGO_PKG_VERSION"));
    let flags = ask(&["--cflags", "--libs"]).expect("it was there before");
    let flags = String::from_utf8_lossy(&flags.stdout).into_owned();
    let program = Program(scratch.dir().join("program"));
    let mut build = Command::new(compiler.name);
    build
        .args(compiler.flags)
        .arg(home().join("tests/programs/faults.c"));
    run(build.args(flags.split_whitespace()).arg("-o").arg(&program.0));
    // Only the name with the version is looked for.
    std::fs::remove_file(format!("{lib}/libblkmq.so")).expect("a link");
    run(program.command().env("LD_LIBRARY_PATH", &lib));
    // Cargo names its own directory there.
    let none = output(program.command().env_remove("LD_LIBRARY_PATH"));
    let said = String::from_utf8_lossy(&none.stderr).into_owned();
    let soname = format!("libblkmq.so.{}", version.rsplit_once('.').expect("a version").0);
    assert!(said.contains(&format!("{soname}:")), "{said}");
}

#[test]
fn exception_that_leaves_a_callback_ends_the_process() {
    let Some(compiler) = cxx("g++") else { return };
    let program = compiler.build(&home().join("tests/programs/throws.cc"), &[]);
    let output = output(&mut program.command());
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("foreign exception"), "{:?}: {said}", output.status);
}

#[test]
fn python_reads_a_file_by_ctypes() {
    let python = Command::new("python3").arg("--version").output();
    if !python.is_ok_and(|output| output.status.success()) {
        return skip("python3 is not installed");
    }
    let mut command = Command::new("python3");
    command
        .arg(home().join("examples/read_a_file.py"))
        .env("BLKMQ_LIBRARY", libraries().join("libblkmq_capi.so"));
    let said = run(&mut command);
    assert!(said.contains("65536 bytes"), "{said}");
}

/// A compiler that is there.
struct Compiler {
    name: &'static str,
    flags: &'static [&'static str],
}

/// A program that was built, removed at the end.
struct Program(PathBuf);

fn c(name: &'static str) -> Option<Compiler> {
    compiler(name, &["-std=c11", "-D_GNU_SOURCE"])
}

fn cxx(name: &'static str) -> Option<Compiler> {
    compiler(name, &["-x", "c++", "-std=c++20"])
}

/// Finds a compiler, or skips aloud.
fn compiler(name: &'static str, flags: &'static [&'static str]) -> Option<Compiler> {
    let there = Command::new(name).arg("--version").output();
    if !there.is_ok_and(|output| output.status.success()) {
        skip(&format!("{name} is not installed"));
        return None;
    }
    Some(Compiler { name, flags })
}

impl Compiler {
    /// Builds a program with the shared library.
    fn build(&self, source: &Path, flags: &[&str]) -> Program {
        let library = format!("-Wl,-rpath,{}", libraries().display());
        let mut words = flags.to_vec();
        words.extend(["-lblkmq_capi", library.as_str()]);
        self.build_with(source, "shared", &words)
    }

    fn build_static(&self, source: &Path) -> Program {
        let library = libraries().join("libblkmq_capi.a");
        let library = library.to_str().expect("a path in UTF-8");
        // What `rustc --print native-static-libs` names.
        let words = [library, "-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];
        self.build_with(source, "static", &words)
    }

    fn build_with(&self, source: &Path, kind: &str, words: &[&str]) -> Program {
        let stem = source.file_stem().expect("a file").to_string_lossy();
        let unique = format!("{:?}", std::thread::current().id()).replace(['(', ')'], "");
        let name = format!(
            "blkmq-{stem}-{}-{kind}-{}-{unique}",
            self.name,
            std::process::id()
        );
        let program = Program(std::env::temp_dir().join(name));
        let mut command = Command::new(self.name);
        command
            .args(["-Wall", "-Wextra", "-Werror"])
            .args(self.flags)
            .arg("-I")
            .arg(home().join("include"))
            .arg(source)
            .args(["-x", "none", "-L"])
            .arg(libraries())
            .args(words)
            .arg("-o")
            .arg(&program.0);
        run(&mut command);
        program
    }
}

impl Program {
    fn command(&self) -> Command {
        Command::new(&self.0)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Runs a command that must succeed, and returns what it prints.
fn run(command: &mut Command) -> String {
    let output = output(command);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{said}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    said
}

fn output(command: &mut Command) -> Output {
    command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

fn home() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where Cargo builds the libraries: beside this program. Programs look there for the name that an installation gives
/// the shared one.
fn libraries() -> PathBuf {
    let own = std::env::current_exe().expect("this program has a path");
    let libraries = own.parent().expect("a build directory").to_owned();
    let version = env!("CARGO_PKG_VERSION").rsplit_once('.').expect("a version").0;
    let link = libraries.join(format!("libblkmq.so.{version}"));
    if let Err(error) = std::os::unix::fs::symlink("libblkmq_capi.so", link) {
        // Each test makes it.
        assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists, "{error}");
    }
    libraries
}
