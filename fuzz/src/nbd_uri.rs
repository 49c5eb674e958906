//! Text against the parser of NBD URIs: any text is an URI or a clear error.

use blkmq_nbd::uri::{Address, Uri};

/// Runs one input.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match text.parse::<Uri>() {
        Ok(uri) => {
            assert!(uri.export.len() <= 4096 && !uri.export.contains('\0'), "{uri:?}");
            match uri.address {
                Address::Unix(path) => assert!((1..108).contains(&path.as_os_str().len()), "{path:?}"),
                Address::Tcp { host, port } => assert!(!host.is_empty() && port > 0, "{host}:{port}"),
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
