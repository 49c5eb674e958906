//! libFuzzer's entry to [`blkmq_fuzz::ublk_requests`].
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| blkmq_fuzz::ublk_requests::run(data));

#[cfg(not(fuzzing))]
fn main() {
    eprintln!("run it with: cargo fuzz run ublk_requests");
}
