//! Decides how numbers look to people: sizes and times with the unit that leaves three digits or fewer.

/// Bytes, in powers of 1024.
pub(crate) fn size(bytes: f64) -> String {
    scaled(bytes, 1024.0, &["B", "K", "M", "G", "T"])
}

/// Nanoseconds; of more than all that can be told apart, `>1h`.
pub(crate) fn time(ns: u64) -> String {
    match ns {
        // The bound of a histogram's last bucket.
        u64::MAX => ">1h".to_owned(),
        ns => scaled(ns as f64, 1000.0, &["ns", "us", "ms", "s"]),
    }
}

fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let (mut value, mut at) = (value, 0);
    while value >= step && at + 1 < units.len() {
        value /= step;
        at += 1;
    }
    match value {
        whole if at == 0 || whole >= 100.0 => format!("{whole:.0}{}", units[at]),
        value => format!("{value:.1}{}", units[at]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_has_the_unit_that_leaves_three_digits() {
        assert_eq!(
            [0.0, 512.0, 1536.0, 3e9].map(size),
            ["0B", "512B", "1.5K", "2.8G"]
        );
        assert_eq!(
            [7, 1500, 250_000_000, u64::MAX].map(time),
            ["7ns", "1.5us", "250ms", ">1h"]
        );
    }
}
