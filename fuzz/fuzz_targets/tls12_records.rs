//! libFuzzer's entry to [`blkmq_fuzz::tls12_records`].
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| blkmq_fuzz::tls12_records::run(data));

#[cfg(not(fuzzing))]
fn main() {
    eprintln!("run it with: cargo fuzz run tls12_records");
}
