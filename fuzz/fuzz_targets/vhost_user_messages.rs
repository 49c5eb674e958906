//! libFuzzer's entry to [`blkmq_fuzz::vhost_user_messages`].
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| blkmq_fuzz::vhost_user_messages::run(data));

#[cfg(not(fuzzing))]
fn main() {
    eprintln!("run it with: cargo fuzz run vhost_user_messages");
}
