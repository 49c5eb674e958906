//! The sockets that systemd hands over to this process (`LISTEN_FDS`), with the names that it gives them
//! (`LISTEN_FDNAMES`). Each is taken once, by an address in `socket`.

use std::sync::{Mutex, PoisonError};

use listenfd::ListenFd;

use super::descriptors::refuse;
use super::socket::{OpenError, Socket};

/// What was handed over.
struct Handed {
    sockets: ListenFd,
    /// The name of each; `None` for one that was taken.
    names: Vec<Option<String>>,
    /// All names, for people.
    known: Vec<String>,
}

/// The variables are read once, and removed: a child would take them for its own.
static HANDED: Mutex<Option<Handed>> = Mutex::new(None);

/// Takes the sockets of a name that no address has taken, or all of them.
///
/// # Errors
/// There is none, or one is of another kind. The text does not name the address.
pub(super) fn take(name: Option<&str>) -> Result<Vec<Socket>, OpenError> {
    let mut handed = HANDED.lock().unwrap_or_else(PoisonError::into_inner);
    handed.get_or_insert_with(Handed::receive).take(name)
}

/// The names of the sockets that no address has taken yet: clients that connect there wait for ever.
pub fn untaken() -> Vec<String> {
    let mut handed = HANDED.lock().unwrap_or_else(PoisonError::into_inner);
    let handed = handed.get_or_insert_with(Handed::receive);
    handed.names.iter().flatten().cloned().collect()
}

impl Handed {
    fn receive() -> Self {
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let sockets = ListenFd::from_env();
        Self::new(sockets, &names)
    }

    fn new(sockets: ListenFd, names: &str) -> Self {
        let mut names = names.split(':').map(str::to_owned);
        let names = (0..sockets.len()).map(|_| names.next().unwrap_or_default());
        let known: Vec<String> = names.collect();
        Self {
            sockets,
            names: known.iter().cloned().map(Some).collect(),
            known,
        }
    }

    fn take(&mut self, name: Option<&str>) -> Result<Vec<Socket>, OpenError> {
        let of_name = |there: &Option<String>| {
            there
                .as_deref()
                .is_some_and(|there| name.is_none_or(|name| name == there))
        };
        let found = (0..self.names.len()).filter(|at| of_name(&self.names[*at]));
        let found: Vec<usize> = found.collect();
        if found.is_empty() {
            return Err(OpenError::new(self.why_none(name)));
        }
        found.into_iter().map(|at| self.take_one(at)).collect()
    }

    fn take_one(&mut self, at: usize) -> Result<Socket, OpenError> {
        self.names[at] = None;
        if let Ok(Some(listener)) = self.sockets.take_unix_listener(at) {
            refuse(&listener);
            return Ok(Socket::Unix(listener, None));
        }
        match self.sockets.take_tcp_listener(at) {
            Ok(Some(listener)) => Ok(Socket::Tcp(listener)),
            _ => Err(OpenError::new(format!(
                "socket {at} is no listening unix or TCP stream socket"
            ))),
        }
    }

    fn why_none(&self, name: Option<&str>) -> String {
        let mut known = self.known.clone();
        known.dedup();
        let known = known.join(", ");
        match name {
            _ if self.known.is_empty() => {
                "no socket was handed over: start this service from a .socket unit (LISTEN_FDS)".to_owned()
            }
            Some(name) if !self.known.iter().any(|there| there == name) => format!(
                "no socket of this name was handed over; there are {known}: name one of them, or set FileDescriptorName= of the \
                 .socket unit"
            ),
            _ => format!(
                "what was handed over is taken by another address, or was; there were {known}: give each address its own, with \
                 systemd:NAME"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_systemd_that_are_missing_are_told_from_those_that_are_taken() {
        let handed = |known: &[&str]| Handed {
            sockets: ListenFd::empty(),
            names: Vec::new(),
            known: known.iter().map(|&name| name.to_owned()).collect(),
        };
        for (known, name, wanted) in [
            (&[][..], None, "no socket was handed over"),
            (&[], Some("a"), "no socket was handed over"),
            (&["a", "a", "b"], Some("c"), "there are a, b"),
            (&["a", "b"], Some("a"), "is taken by another address"),
            (&["a", "b"], None, "is taken by another address"),
        ] {
            let said = handed(known).take(name).unwrap_err().to_string();
            assert!(said.contains(wanted), "{said}");
        }
    }
}
