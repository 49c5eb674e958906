//! The address of the configuration that a command names: the text of the configuration, or another form of
//! the same path, as the daemon resolves it. `methods` has the commands.

use std::path::{Path, PathBuf, absolute};

use blkmq_config::{Document, Kind};

/// The name that the configuration has for an object: of an address, the configured text, if `name`
/// is the same address. May block, as looking up a directory may.
pub(super) fn configured(document: &Document, kind: Kind, name: &str) -> String {
    let is_known = kind != Kind::Export || document.get(kind, name).is_some();
    let wanted = if is_known { None } else { resolved(name) };
    let is_same = |address: &&str| resolved(address) == wanted;
    let found = wanted.as_ref().and_then(|_| document.addresses().find(is_same));
    found.unwrap_or(name).to_owned()
}

/// An address with the path that it has for the daemon; none if there is no such path.
fn resolved(address: &str) -> Option<(&str, PathBuf)> {
    let path = SCHEMES.iter().find_map(|scheme| address.strip_prefix(scheme));
    let path = path.unwrap_or(address);
    let scheme = &address[..address.len() - path.len()];
    let path = Path::new(path);
    let parent = path.parent()?;
    let parent = if parent.as_os_str().is_empty() {
        Path::new(".")
    } else {
        parent
    };
    // A directory that is not there, or has a disk's name in its place, has no other names.
    let parent = parent.canonicalize().or_else(|_| absolute(parent)).ok()?;
    Some((scheme, parent.join(path.file_name()?)))
}

/// What precedes the path of a socket. The address of a file is its path.
const SCHEMES: &[&str] = &["connect:unix:", "unix:"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_found_by_each_form_of_its_path_and_by_no_other_path() {
        let text = "[[export]]\nnbd = \"unix:run/a.sock\"\ntls_key = \"/k\"\n[[export]]\nfuse = \"/tmp/{disk}\"\n\
                    [[export]]\nnbd = \"tcp:127.0.0.1:1\"";
        let document = Document::from_toml(text).unwrap();
        let here = std::env::current_dir().unwrap();
        let here = here.display();
        for (name, wanted) in [
            ("unix:run/a.sock", "unix:run/a.sock"),
            ("unix:./run/a.sock", "unix:run/a.sock"),
            (&format!("unix:{here}/run/a.sock"), "unix:run/a.sock"),
            (&format!("{here}/run/a.sock"), &format!("{here}/run/a.sock")),
            ("/tmp/../tmp/{disk}", "/tmp/{disk}"),
            ("/tmp/a", "/tmp/a"),
            ("tcp:127.0.0.1:1", "tcp:127.0.0.1:1"),
            ("tcp:127.0.0.1:2", "tcp:127.0.0.1:2"),
            ("", ""),
            ("/", "/"),
        ] {
            assert_eq!(configured(&document, Kind::Export, name), wanted, "{name}");
        }
        // Other kinds have no paths.
        assert_eq!(configured(&document, Kind::Group, "/tmp/../b"), "/tmp/../b");
    }
}
