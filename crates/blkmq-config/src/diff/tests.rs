//! Tests of the steps from one configuration to another.

use super::*;

fn steps(old: &str, new: &str) -> Result<String> {
    let config = |text: &str| Config::from_toml(text).unwrap();
    let sizes = [("b".to_owned(), 2 << 20)].into();
    let steps = diff(&config(old), &config(new), &sizes)?;
    let texts: Vec<String> = steps.iter().map(Change::to_string).collect();
    Ok(texts.join("; "))
}

const ENCRYPTED: &str = "[disk.e]\nluks = \"b\"\n[disk.b]\nram = \"1M\"";

const A: &str = "[disk.a]\nram = \"1M\"\n";

#[test]
fn exports_of_one_address_differ_in_nothing_or_cannot_be_changed() {
    let export = |disk: &str| format!("[[export]]\nnbd = \"tcp:0\"\ndisks = [\"{disk}\"]\n");
    let [a, b] = ["a", "b"].map(export);
    let (both, swapped) = (format!("{a}{b}"), format!("{b}{a}"));
    for (old, new, wanted) in [
        (both.as_str(), both.as_str(), ""),
        ("", &both, "serve at nbd tcp:0; serve at nbd tcp:0"),
        (&both, "", "close nbd tcp:0; close nbd tcp:0"),
    ] {
        assert_eq!(steps(old, new).unwrap(), wanted, "{old} -> {new}");
    }
    for (old, new) in [(&both, &swapped), (&a, &both), (&both, &b)] {
        let error = steps(old, new).unwrap_err().to_string();
        assert!(
            error.contains("export tcp:0 cannot be changed while the daemon runs"),
            "{old} -> {new}: {error}"
        );
    }
}

#[test]
fn each_difference_is_a_step() {
    for (old, new, wanted) in [
        ("", "", ""),
        ("", "[disk.b]\nram = \"1M\"", "add disk b"),
        // It has grown since.
        (
            "[disk.b]\nfile = \"b\"\nsize = \"2M\"",
            "[disk.b]\nfile = \"b\"\nsize = \"1M\"",
            "",
        ),
        (
            "[disk.b]\nfile = \"b\"\nsize = \"1M\"",
            "[disk.b]\nfile = \"b\"",
            "",
        ),
        // Larger than what is served, which is said elsewhere.
        (
            "[disk.b]\nfile = \"b\"\nsize = \"9M\"",
            "[disk.b]\nfile = \"b\"\nsize = \"9M\"",
            "",
        ),
        (
            "[disk.b]\nfile = \"b\"",
            "[disk.b]\nfile = \"b\"\nsize = \"2M\"",
            "",
        ),
        (
            "[group.\"/x\"]\nweight = 3",
            "[group.\"/x\"]\nweight = 4",
            "set group /x",
        ),
        ("[group.\"/x\"]", "", "set group /x"),
        ("[queue.q]\ndepth = 3", "[queue.q]\ndepth = 4", "set queues"),
        ("", "[daemon]\nsched = \"bfq\"", "set queues"),
        (
            "[[export]]\nnbd = \"unix:x\"",
            "[[export]]\nnbd = \"unix:y\"",
            "close nbd unix:x; serve at nbd unix:y",
        ),
        (
            "[[export]]\nnbd = \"unix:x\"",
            "[[export]]\nnbd = \"unix:x\"\nconnections = 3",
            "change what is served at nbd unix:x",
        ),
        ("[daemon]\nshutdown_limit = \"1s\"", "", "set shutdown_limit"),
        (
            "[disk.x]\nfile = \"/f\"",
            "[disk.y]\nfile = \"/f\"",
            "remove disk x; add disk y",
        ),
        (
            "[disk.x]\nram = \"1M\"\nqueue = \"q\"",
            "[disk.y]\nram = \"1M\"\nqueue = \"q\"",
            "remove disk x; add disk y",
        ),
        (
            "[disk.x]\nfile = \"/f\"",
            "[disk.y]\nfile = \"/g\"",
            "add disk y; remove disk x",
        ),
        (
            "",
            "[disk.p]\nram = \"1M\"\n[disk.m]\nmultipath = \"p\"",
            "add disk m",
        ),
        (
            "[disk.p]\nram = \"1M\"",
            "[disk.p]\nram = \"1M\"\n[disk.m]\nmultipath = \"p\"",
            "remove disk p; add disk m",
        ),
        (
            "[disk.p]\nram = \"1M\"\n[disk.m]\nmultipath = \"p\"",
            "[disk.p]\nram = \"1M\"",
            "remove disk m; add disk p",
        ),
        ("", ENCRYPTED, "add disk b; add disk e"),
        (ENCRYPTED, "", "remove disk e; remove disk b"),
        (ENCRYPTED, "[disk.b]\nram = \"1M\"", "remove disk e"),
        (
            ENCRYPTED,
            "[disk.f]\nluks = \"b\"\n[disk.b]\nram = \"1M\"",
            "remove disk e; add disk f",
        ),
        (
            ENCRYPTED,
            "[disk.m]\nmultipath = \"b\"\n[disk.b]\nram = \"1M\"",
            "remove disk e; remove disk b; add disk m",
        ),
        (
            "[disk.e]\nluks = \"b\"\n[disk.b]\nfile = \"/f\"",
            "[disk.y]\nfile = \"/f\"",
            "remove disk e; remove disk b; add disk y",
        ),
        (
            ENCRYPTED,
            "[disk.e]\nluks = \"b\"\nkey = \"/k\"\n[disk.b]\nram = \"1M\"",
            "set key of disk e",
        ),
    ] {
        let found = steps(&format!("{old}\n{A}"), &format!("{new}\n{A}")).unwrap();
        assert_eq!(found, wanted, "{old} -> {new}");
    }
}

#[test]
fn change_that_needs_a_restart_is_named() {
    for (old, new, part) in [
        (
            "[daemon]\nreactors = 1",
            "[daemon]\nreactors = 2",
            "[daemon] reactors: cannot be changed while the daemon runs (1 -> 2)",
        ),
        (
            "[control]\nsocket = \"unix:/c\"",
            "",
            "[control] socket: cannot be changed while the daemon runs (\"unix:/c\" -> default)",
        ),
        ("", "[control]\nreaders = \"@disk\"", "[control] readers: cannot"),
        (
            "",
            "[control]\ntenants = { \"/a\" = \"7\" }",
            "[control] tenants: cannot be changed while the daemon runs (none -> /a: 7)",
        ),
        (
            "[metrics]\naddress = \"unix:/m\"",
            "[metrics]\naddress = \"unix:/n\"",
            "[metrics] address: cannot",
        ),
        (
            "[disk.b]\nram = \"1M\"",
            "[disk.b]\nram = \"2M\"",
            "disk b: its source with",
        ),
        (
            "[disk.b]\nfile = \"b\"\nsize = \"1M\"",
            "[disk.b]\nfile = \"b\"\nsize = \"3M\"",
            "disk b: its source with",
        ),
        (
            "[disk.b]\nfile = \"b\"\nsize = \"2M\"",
            "[disk.b]\nfile = \"c\"\nsize = \"1M\"",
            "disk b: its source with",
        ),
        (
            "[disk.b]\nfile = \"b\"\nsize = \"2M\"\n[disk.l]\nlinear = \"b+a\"",
            "[disk.b]\nfile = \"b\"\nsize = \"1M\"\n[disk.l]\nlinear = \"b+a\"",
            "disk b: its source with",
        ),
        (
            "[disk.b]\nfile = \"b\"",
            "[disk.b]\nfile = \"b\"\ngroup = \"/x\"",
            "disk b: group: cannot be changed while it is served (\"/b\" -> \"/x\"): remove it",
        ),
        (
            "[disk.b]\nfile = \"b\"",
            "[disk.b]\nfile = \"b\"\nqueue = \"q\"",
            "disk b: queue: cannot be changed while it is served (default -> \"q\"): remove it",
        ),
        (
            "",
            "[disk.b]\nram = \"1M\"\nqueue = \"a\"",
            "disk b: queue a has disk a already",
        ),
        (
            "",
            "[disk.b]\nram = \"1M\"\nqueue = \"q\"\n[disk.c]\nram = \"1M\"\nqueue = \"q\"",
            "disk c: queue q has disk b already",
        ),
        (
            "",
            "[disk.b]\nfile = \"b\"\nqueue = \"a\"",
            "disk b: queue a has disk a already",
        ),
        ("", "[disk.l]\nlinear = \"a\"", "disk l: lies on other disks"),
        ("[disk.l]\nlinear = \"a\"", "", "disk l: lies on other disks"),
        (
            ENCRYPTED,
            "[disk.e]\nluks = \"b\"\ndiscard = true\n[disk.b]\nram = \"1M\"",
            "disk e: discard: cannot be changed while it is served (false -> true): remove it",
        ),
        (
            ENCRYPTED,
            "[disk.e]\nluks = \"a\"\n[disk.b]\nram = \"1M\"",
            "disk e: its source with",
        ),
        (
            "[queue.q]\ntimeout = \"1s\"\n[disk.q]\nram = \"1M\"\nqueue = \"q\"",
            "[disk.q]\nram = \"1M\"\nqueue = \"q\"",
            "queue q: timeout",
        ),
    ] {
        let error = steps(&format!("{old}\n{A}"), &format!("{new}\n{A}"))
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{old} -> {new}: {error}");
    }
}
