//! The name under which programs find the shared library, as cargo-c gives it: before 1.0 a minor version is another
//! interface.

fn main() {
    let part = |name: &str| std::env::var(name).expect("Cargo sets it");
    let (major, minor) = (part("CARGO_PKG_VERSION_MAJOR"), part("CARGO_PKG_VERSION_MINOR"));
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libblkmq.so.{major}.{minor}");
    println!("cargo::rerun-if-changed=build.rs");
}
