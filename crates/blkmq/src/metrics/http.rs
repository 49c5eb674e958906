//! HTTP as far as metrics need it: what a request asks for, and the response. `server` has the clients.
//! Methods and status codes are those of RFC 9110.

use super::collect::Form;

/// What a request asks for.
pub(super) struct Asked {
    pub(super) method: String,
    pub(super) path: String,
    /// Keys and values behind the path.
    pub(super) query: Vec<(String, String)>,
    pub(super) form: Form,
}

/// The result of parsing what has arrived.
pub(super) enum Parsed {
    Asked(Asked),
    /// The request is incomplete.
    More,
    /// An invalid request.
    Bad,
}

/// Parses what has arrived of a request.
pub(super) fn parse(bytes: &[u8]) -> Parsed {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {
            let path = request.path.unwrap_or_default();
            let (path, query) = path.split_once('?').unwrap_or((path, ""));
            let pair = |pair: &str| {
                let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                (key.to_owned(), value.to_owned())
            };
            let mut accepts = request
                .headers
                .iter()
                .filter(|header| header.name.eq_ignore_ascii_case("accept"));
            Parsed::Asked(Asked {
                method: request.method.unwrap_or_default().to_owned(),
                path: path.to_owned(),
                query: query
                    .split('&')
                    .filter(|pair| !pair.is_empty())
                    .map(pair)
                    .collect(),
                form: match accepts.any(|header| header.value.windows(11).any(|word| word == b"openmetrics"))
                {
                    true => Form::OpenMetrics,
                    false => Form::Classic,
                },
            })
        }
        Ok(httparse::Status::Partial) => Parsed::More,
        _ => Parsed::Bad,
    }
}

pub(super) fn content_type(form: Form) -> &'static str {
    match form {
        Form::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        Form::Classic => "text/plain; version=0.0.4; charset=utf-8",
    }
}

/// A whole response, after which the connection ends.
pub(super) fn answer(status: &str, kind: &str, body: impl Into<Vec<u8>>) -> Vec<u8> {
    let mut bytes = body.into();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        bytes.len()
    );
    bytes.splice(0..0, head.into_bytes());
    bytes
}

/// The response to a method that the path does not have (RFC 9110, section 15.5.6).
pub(super) fn not_allowed() -> Vec<u8> {
    let status = format!("405 Method Not Allowed\r\nAllow: {METHOD}");
    answer(&status, PLAIN, "metrics are only read: the method is GET\n")
}

/// The only method.
pub(super) const METHOD: &str = "GET";
/// The content type of errors.
pub(super) const PLAIN: &str = "text/plain";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_has_a_method_and_a_path_and_is_all_there() {
        let path = |text: &str| match parse(text.as_bytes()) {
            Parsed::Asked(asked) => {
                let query: Vec<String> = asked
                    .query
                    .iter()
                    .map(|(key, value)| format!("{key}:{value}"))
                    .collect();
                format!(
                    "{} {} {} {:?}",
                    asked.method,
                    asked.path,
                    query.join(","),
                    asked.form
                )
            }
            Parsed::More => "more".to_owned(),
            Parsed::Bad => "bad".to_owned(),
        };
        assert_eq!(
            path("GET /metrics?x=1&&y HTTP/1.1\r\nHost: a\r\n\r\n"),
            "GET /metrics x:1,y: Classic"
        );
        let open = "GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text;version=1.0.0\r\n\r\n";
        assert_eq!(path(open), "GET /metrics  OpenMetrics");
        assert_eq!(path("GET /metrics HTTP/1.1\r\nHo"), "more");
        assert_eq!(path("POST /metrics HTTP/1.1\r\n\r\n"), "POST /metrics  Classic");
        assert_eq!(path("\u{1}\u{2}\r\n\r\n"), "bad");
    }
}
