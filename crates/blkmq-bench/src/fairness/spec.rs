//! The texts of `--case`: a tenant for each `WEIGHT:DEPTH:SIZE[:OP][@RATE|/REST]`, as in
//! `1:64:64k,2:4:64k:randwrite`, `1:32:64k,1:1:4k@200` or `1:32:64k,1:8:4k/20`. The result is a scene like those
//! of `cases`.

use blkmq_core::bio::Op;
use blkmq_core::group::{ROOT, WEIGHT_MAX, WEIGHT_MIN};
use blkmq_host::value;

use super::cases::scale;
use super::scene::{Load, Scene};

/// Reads a case, whose name is the text itself.
///
/// # Errors
/// Names the tenant, what is wrong with it, and what is allowed.
pub(super) fn parse(text: &str) -> Result<Scene, String> {
    let words: Vec<&str> = text.split(',').collect();
    if words.len() > TENANTS_MAX {
        return Err(format!(
            "it has {} tenants: must be from 1 to {TENANTS_MAX}; put them into several cases",
            words.len()
        ));
    }
    let tenants: Vec<(u16, Load)> = words
        .iter()
        .enumerate()
        .map(|(place, word)| tenant(word).map_err(|why| format!("tenant {} ({word}): {why}", place + 1)))
        .collect::<Result<_, _>>()?;
    let scale = scale(tenants.iter().map(|(weight, _)| *weight));
    let scene = Scene::new(text);
    Ok(tenants.into_iter().fold(scene, |scene, (weight, load)| {
        scene.tenant(ROOT, weight * scale, load)
    }))
}

/// Reads the weight and the load of one tenant.
///
/// # Errors
/// Says what is wrong, and what is allowed.
pub(super) fn tenant(word: &str) -> Result<(u16, Load), String> {
    let (mut kind, mut rate, mut rest_ms) = (word, 0, 0);
    if let Some((before, pause)) = word.split_once(['@', '/']) {
        kind = before;
        match word.contains('@') {
            true => rate = number("rate", pause, 1, RATE_MAX)?,
            false => rest_ms = number("rest", pause, 1, REST_MAX)?,
        }
    }
    let parts: Vec<&str> = kind.split(':').collect();
    let (weight, depth, size, op) = match parts[..] {
        [weight, depth, size] => (weight, depth, size, "randread"),
        [weight, depth, size, op] => (weight, depth, size, op),
        _ => return Err("must be WEIGHT:DEPTH:SIZE[:OP][@RATE|/REST], as in 2:4:64k:randread".into()),
    };
    let (op, is_random) = operation(op)?;
    let load = Load {
        op,
        is_random,
        block_bytes: block_bytes(size)?,
        depth: number("depth", depth, 1, DEPTH_MAX)?,
        rate,
        rest_ms,
    };
    let weight = number("weight", weight, WEIGHT_MIN.into(), WEIGHT_MAX.into())?;
    Ok((weight as u16, load))
}

fn number(what: &str, word: &str, least: u32, most: u32) -> Result<u32, String> {
    let number = word.parse().ok();
    number
        .filter(|number| (least..=most).contains(number))
        .ok_or_else(|| format!("{what} {word} rejected: must be a whole number from {least} to {most}"))
}

fn block_bytes(word: &str) -> Result<u32, String> {
    let bytes = value::size("size", word).ok();
    bytes
        .filter(|bytes| bytes.is_multiple_of(BLOCK_BYTES) && (BLOCK_BYTES..=BLOCK_BYTES_MAX).contains(bytes))
        .map(|bytes| bytes as u32)
        .ok_or_else(|| format!("size {word} rejected: must be a multiple of 4k from 4k to 1M"))
}

fn operation(word: &str) -> Result<(Op, bool), String> {
    match word {
        "randread" => Ok((Op::Read, true)),
        "randwrite" => Ok((Op::Write, true)),
        "read" => Ok((Op::Read, false)),
        "write" => Ok((Op::Write, false)),
        _ => Err(format!(
            "operation {word} rejected: must be randread, randwrite, read or write"
        )),
    }
}

/// There are enough groups for this many tenants, and this many processes can start at about the
/// same time.
const TENANTS_MAX: usize = 64;
const DEPTH_MAX: u32 = 1024;
/// I/Os per second of a tenant that pauses.
const RATE_MAX: u32 = 100_000;
/// Milliseconds between bursts.
const REST_MAX: u32 = 60_000;
/// The sector size that every drive of the bench supports with direct I/O.
const BLOCK_BYTES: u64 = 4096;
const BLOCK_BYTES_MAX: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_has_a_tenant_for_each_part_and_its_own_text_as_its_name() {
        let scene = parse("1:64:64k,2:4:4096:write,1:1:1M:randwrite@50,4:8:16K:read").unwrap();
        assert_eq!(
            scene.case,
            "1:64:64k,2:4:4096:write,1:1:1M:randwrite@50,4:8:16K:read"
        );
        let shown: Vec<(u16, String)> = scene
            .crowd
            .iter()
            .map(|tenant| (scene.weight(tenant), tenant.load.to_string()))
            .collect();
        let expected = [
            (100, "64x64k"),
            (200, "4x4k:write"),
            (100, "1x1024k:randwrite@50"),
            (400, "8x16k:read"),
        ];
        assert_eq!(shown, expected.map(|(weight, load)| (weight, load.to_owned())));
    }

    #[test]
    fn load_is_read_back_from_its_own_text() {
        for load in ["1:1:4k@200", "1:8:4k/20", "1:16:256k:write", "1:32:64k:randread"] {
            let (_, load) = tenant(load).unwrap();
            assert_eq!(tenant(&format!("1:{}", load.spec())).unwrap(), (1, load));
        }
    }

    #[test]
    fn weights_that_groups_can_have_are_taken_as_they_are() {
        let scene = parse("1:4:4k,1000:4:4k").unwrap();
        let weights: Vec<u16> = scene.crowd.iter().map(|tenant| scene.weight(tenant)).collect();
        assert_eq!(weights, [1, 1000]);
    }

    #[test]
    fn fault_is_named_with_its_tenant_and_the_allowed_values() {
        for (text, expected) in [
            ("", "tenant 1 (): must be WEIGHT:DEPTH:SIZE[:OP]"),
            ("1:2:4k,2:4", "tenant 2 (2:4): must be WEIGHT:DEPTH:SIZE[:OP]"),
            ("1:2:4k:read:x", "must be WEIGHT:DEPTH:SIZE[:OP]"),
            (
                "0:2:4k",
                "weight 0 rejected: must be a whole number from 1 to 1000",
            ),
            ("1001:2:4k", "weight 1001 rejected"),
            (
                "1:0:4k",
                "depth 0 rejected: must be a whole number from 1 to 1024",
            ),
            ("1:-1:4k", "depth -1 rejected"),
            (
                "1:2:5000",
                "size 5000 rejected: must be a multiple of 4k from 4k to 1M",
            ),
            ("1:2:2M", "size 2M rejected"),
            ("1:2:big", "size big rejected"),
            (
                "1:1:4k@0",
                "rate 0 rejected: must be a whole number from 1 to 100000",
            ),
            (
                "1:8:4k/0",
                "rest 0 rejected: must be a whole number from 1 to 60000",
            ),
            ("1:8:4k@5/20", "rate 5/20 rejected"),
            (
                "1:2:4k:trim",
                "operation trim rejected: must be randread, randwrite, read or write",
            ),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
        let many = ["1:1:4k"; 65].join(",");
        assert!(
            parse(&many)
                .expect_err("too many")
                .contains("65 tenants: must be from 1 to 64")
        );
    }
}
