//! Tests whether paths of a multipath disk are opened with it alone, and served to nobody.

use super::Stage;
use crate::common::Scratch;

#[test]
fn paths_are_neither_served_nor_disks_of_their_own_at_the_start_and_later() {
    let scratch = Scratch::new();
    let sockets = format!("unix:{}", scratch.word("{disk}.vsock"));
    let disks = ["--disk", "name=p,ram=1M", "--disk", "name=m,multipath=p"];
    let stage = Stage::of(scratch, &[&disks[..], &["--vhost-user", &sockets]].concat());
    let exists = |name: &str| stage.scratch.path(&format!("{name}.vsock")).exists();
    assert!(exists("m") && exists("vm1") && !exists("p"));
    let (_, dumped) = stage.ctl(&["dump"]);
    let file = stage.scratch.word("more.toml");
    let more = "[disk.q]\nram = \"1M\"\n[disk.n]\nmultipath = \"q\"\n";
    std::fs::write(&file, format!("{dumped}\n{more}")).expect("the file can be written");
    assert_eq!(stage.ctl(&["apply", &file]), (0, "add disk n\n".to_owned()));
    assert!(exists("n") && !exists("q"));
    let (code, said) = stage.ctl(&["show", "disk", "q"]);
    assert!(code == 1 && said.contains("there are: m, n, vm1"), "{said}");
    let (code, said) = stage.ctl(&["remove", "disk", "q"]);
    assert!(code == 1 && said.contains("disk n: path q rejected"), "{said}");
    let back = stage.scratch.word("back.toml");
    std::fs::write(&back, dumped).expect("the file can be written");
    assert_eq!(
        stage.ctl(&["apply", &back, "--remove"]),
        (0, "remove disk n\n".to_owned())
    );
    stage.daemon.stop();
}
