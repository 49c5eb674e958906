//! libFuzzer's entry to [`blkmq_fuzz::qcow2_images`].
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| blkmq_fuzz::qcow2_images::run(data));

#[cfg(not(fuzzing))]
fn main() {
    eprintln!("run it with: cargo fuzz run qcow2_images");
}
