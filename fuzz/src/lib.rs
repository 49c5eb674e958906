//! The fuzz targets: what each does with its bytes; `fuzz_targets/` and the test of the corpus only call it.
//!
//! To add a target: a module with `pub fn run(&[u8])`, a line in [`TARGETS`], a file in `fuzz_targets/` with its `[[bin]]`
//! in `Cargo.toml`, and seeds in `corpus/NAME/` (written by `cargo run --example seeds`, if they can be).

pub mod blktrace_records;
pub mod configuration;
#[cfg(test)]
mod corpus;
pub mod fuse_requests;
pub mod handover_messages;
pub mod luks_headers;
pub mod nbd_client_bytes;
pub mod nbd_reply_bytes;
pub mod nbd_server_bytes;
pub mod nbd_uri;
pub mod operations;
pub mod qcow2_images;
pub mod tls12_records;
pub mod tls_records;
pub mod ublk_requests;
pub mod vhost_user_chains;
pub mod vhost_user_messages;

/// A target's body. It panics where an invariant is broken.
pub type Body = fn(&[u8]);

/// Every target: its name, which is also its corpus's directory, and its body.
pub const TARGETS: &[(&str, Body)] = &[
    ("blktrace_records", blktrace_records::run),
    ("configuration", configuration::run),
    ("fuse_requests", fuse_requests::run),
    ("handover_messages", handover_messages::run),
    ("luks_headers", luks_headers::run),
    ("nbd_client_bytes", nbd_client_bytes::run),
    ("nbd_reply_bytes", nbd_reply_bytes::run),
    ("nbd_server_bytes", nbd_server_bytes::run),
    ("nbd_uri", nbd_uri::run),
    ("operations", operations::run),
    ("qcow2_images", qcow2_images::run),
    ("tls12_records", tls12_records::run),
    ("tls_records", tls_records::run),
    ("ublk_requests", ublk_requests::run),
    ("vhost_user_chains", vhost_user_chains::run),
    ("vhost_user_messages", vhost_user_messages::run),
];
