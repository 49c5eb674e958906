//! libFuzzer's entry to [`blkmq_fuzz::nbd_reply_bytes`].
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| blkmq_fuzz::nbd_reply_bytes::run(data));

#[cfg(not(fuzzing))]
fn main() {
    eprintln!("run it with: cargo fuzz run nbd_reply_bytes");
}
