//! The metadata contexts that a client finds and selects during `negotiation`: `base:allocation` is the only
//! one.

use std::sync::Arc;

use blkmq_nbd::codec::HeaderStyle;
use blkmq_nbd::codec::handshake::MetaRequest;
use blkmq_nbd::codec::option_reply::{OptionReplies, ReplyKind};

use super::negotiation::{ALLOCATION_CONTEXT_ID, Negotiation};
use crate::nbd::export::Export;

/// The only metadata context.
const ALLOCATION_CONTEXT: &str = "base:allocation";

impl Negotiation {
    pub(super) fn answer_list_contexts(&self, data: &[u8], replies: &mut OptionReplies<'_>) {
        let Some((request, export)) = self.parse_contexts(data, replies) else {
            return;
        };
        let asked = request.query_count == 0
            || request
                .queries()
                .any(|query| query == "base:" || query == ALLOCATION_CONTEXT);
        if asked && export.features.block_status {
            replies.meta_context(0, ALLOCATION_CONTEXT);
        }
        replies.ack();
    }

    pub(super) fn answer_set_contexts(&mut self, data: &[u8], replies: &mut OptionReplies<'_>) {
        self.context = None;
        let Some((request, export)) = self.parse_contexts(data, replies) else {
            return;
        };
        let selected =
            export.features.block_status && request.queries().any(|query| query == ALLOCATION_CONTEXT);
        let id = export.id;
        if selected {
            self.context = Some(id);
            replies.meta_context(ALLOCATION_CONTEXT_ID, ALLOCATION_CONTEXT);
        }
        replies.ack();
    }

    fn parse_contexts<'a>(
        &self,
        data: &'a [u8],
        replies: &mut OptionReplies<'_>,
    ) -> Option<(MetaRequest<'a>, &Arc<Export>)> {
        if self.style == HeaderStyle::Simple {
            replies.error(
                ReplyKind::ERR_INVALID,
                "metadata needs STRUCTURED_REPLY or EXTENDED_HEADERS first",
            );
            return None;
        }
        let Some(request) = MetaRequest::parse(data) else {
            replies.error(
                ReplyKind::ERR_INVALID,
                "malformed option: name and queries do not fill its data",
            );
            return None;
        };
        Some((request, self.find(request.name, replies)?))
    }
}
