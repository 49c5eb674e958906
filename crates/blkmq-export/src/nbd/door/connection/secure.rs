//! How TLS begins on a connection: the answer to `STARTTLS` leaves, records go to and fro while `handshakes` does the arithmetic,
//! and the session goes on with what the client may see by its certificate.
//!
//! ```text
//!  plain ─STARTTLS─► answering ─answer is sent─► here ⇄ away (a step is done elsewhere) ─► secure
//! ```

use std::os::fd::AsFd;
use std::sync::Arc;

use blkmq_host::service::Cx;
use blkmq_tls::Stream;

use super::super::handshakes::{Desk, Done};
use super::super::wire::{self, Received};
use super::{Connection, NbdClient};
use crate::common::client::Protocol;
use crate::common::life::Event;

/// A handshake under way.
#[derive(Debug)]
pub(super) enum Handshake {
    /// The answer to `STARTTLS` is on its way out.
    Answering,
    /// More is to be received or sent.
    Here(Box<Stream>, Arc<Desk>),
    /// A step is being done.
    Away(Arc<Desk>),
}

impl NbdClient {
    /// `STARTTLS` is granted, unless bytes are there already that did not come by TLS.
    #[cold]
    pub(super) fn start_tls(&mut self, cx: &mut Cx<'_>) {
        if self.protocol.receive.is_empty() {
            self.protocol.handshake = Some(Handshake::Answering);
        } else {
            self.fail_handshake(cx, "bytes behind STARTTLS, before it was answered");
        }
    }

    /// Takes the handshake on as far as it goes now.
    #[cold]
    pub(super) fn shake_hands(&mut self, cx: &mut Cx<'_>) {
        match self.protocol.handshake.take() {
            Some(Handshake::Answering) if self.protocol.transmit.is_empty() => self.begin_handshake(cx),
            Some(Handshake::Away(desk)) => match desk.take() {
                Some(done) => self.step_done(cx, done, desk),
                None => self.protocol.handshake = Some(Handshake::Away(desk)),
            },
            other => self.protocol.handshake = other,
        }
        if let Some(Handshake::Here(..)) = self.protocol.handshake {
            self.exchange(cx);
        }
    }

    fn begin_handshake(&mut self, cx: &mut Cx<'_>) {
        let server = self.protocol.door.offered().server.clone();
        match server.and_then(|server| server.accept()) {
            Some(stream) => {
                let desk = Arc::new(Desk::new(cx.waker()));
                self.protocol.handshake = Some(Handshake::Here(Box::new(stream), desk));
            }
            None => self.fail_handshake(cx, "there is no TLS here any more"),
        }
    }

    /// A step was done elsewhere: the handshake has ended, or goes on, or has come to nothing.
    fn step_done(&mut self, cx: &mut Cx<'_>, done: Done, desk: Arc<Desk>) {
        let Done { mut stream, outcome } = done;
        match outcome {
            Ok(None) => self.protocol.handshake = Some(Handshake::Here(stream, desk)),
            Ok(Some(names)) => {
                let offered = self.protocol.door.offered();
                let seen = offered.exports.only(|disk| offered.tls.may_see(&names, disk));
                tracing::debug!("nbd: {} uses TLS, names {names:?}", Connection::name(self));
                if seen.iter().next().is_none() {
                    let what = format_args!(
                        "sees no disk: tls_clients has none of the names of its certificate, {names:?}"
                    );
                    self.warn(cx.now(), what);
                }
                self.protocol.session.secure(Arc::new(seen));
                self.protocol.wire.secure(stream);
                self.protocol.readiness.is_readable = true;
            }
            Err(why) => {
                // What the client is told, if it can be told at once.
                let _ = wire::flush(&mut stream, self.protocol.wire.socket().as_fd());
                self.fail_handshake(cx, &why);
            }
        }
    }

    /// Sends what waits and receives what is there; a step follows if something came.
    fn exchange(&mut self, cx: &mut Cx<'_>) {
        let Some(Handshake::Here(mut stream, desk)) = self.protocol.handshake.take() else {
            return;
        };
        match wire::flush(&mut stream, self.protocol.wire.socket().as_fd()) {
            Ok(out) if out.is_blocked => self.protocol.wait_for_room(cx),
            Ok(_) => {}
            Err(errno) => return self.fail_handshake(cx, &errno.to_string()),
        }
        let received = match self.protocol.readiness.is_readable {
            true => wire::receive(self.protocol.wire.socket().as_fd(), stream.room()),
            false => Ok(Received::Nothing),
        };
        match received {
            Ok(Received::Full(bytes) | Received::Drained(bytes)) => {
                stream.received(bytes);
                self.protocol.door.shared.handshakes.take_on(stream, &desk);
                self.protocol.handshake = Some(Handshake::Away(desk));
            }
            Ok(Received::Nothing | Received::Enough) => {
                self.protocol.readiness.is_readable = false;
                self.protocol.handshake = Some(Handshake::Here(stream, desk));
            }
            Ok(Received::End) => self.fail_handshake(cx, "the client has left"),
            Err(error) => self.fail_handshake(cx, &error.to_string()),
        }
    }

    fn fail_handshake(&mut self, cx: &mut Cx<'_>, why: &str) {
        self.warn(cx.now(), format_args!("closed: TLS handshake failed: {why}"));
        self.protocol.handshake = None;
        self.life.apply(Event::Lose);
    }
}

impl Connection {
    /// Says whether it is TLS, or about to be: only this process can go on with it then.
    pub(super) fn has_secrets(&self) -> bool {
        self.handshake.is_some() || self.wire.is_secure()
    }
}
