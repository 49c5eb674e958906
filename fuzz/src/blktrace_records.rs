//! Bytes against the reader of blktrace's records: a record, not enough bytes, or a clear error; what was read is written the same.

use blkmq_core::trace::blktrace::Record;

/// Runs one input: a file of records.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let mut rest = data;
    loop {
        match Record::parse(rest) {
            Ok(Some((record, len))) => {
                assert!((1..=rest.len()).contains(&len), "{len} bytes of {}", rest.len());
                let mut written = Vec::new();
                record.write(&mut written);
                let again = Record::parse(&written).expect("what was written is a record");
                let (again, _) = again.expect("a whole one");
                assert!(record.text.starts_with(&again.text), "{record:?}");
                assert_eq!(
                    again,
                    Record {
                        text: again.text.clone(),
                        ..record
                    }
                );
                rest = &rest[len..];
            }
            Ok(None) => return,
            Err(error) => return assert!(!error.to_string().is_empty()),
        }
    }
}
