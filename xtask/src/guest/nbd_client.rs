//! The kernel's NBD client, as Debian 12 has it, in a guest: with TLS 1.2, which is all that it has, and what its users see
//! when the daemon is killed or replaced.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::initrd::Initrd;
use super::packages::Place;
use super::{SUCCESS, boot_plain, is_said};
use crate::steps::run_shown;
use blkmq_testkit::tools::find;

/// Boots a guest in which the daemon serves such a client.
///
/// # Errors
/// If the guest finds anything wrong, or there is no guest.
pub(super) fn run(place: &Place, program: &Path) -> Result<()> {
    let mut initrd = Initrd::new(place)?;
    initrd.add_program(program, "blkmq")?;
    for tool in ["nbd-client", "mkfs.ext4", "e2fsck"] {
        initrd.add_tool(tool)?;
    }
    initrd.add_module("nbd", "")?;
    make_certificates(&initrd.path("pki"))?;
    let script = SCRIPT.replace("SUCCESS", SUCCESS);
    let said = boot_plain(place, &initrd.pack(&script)?, TIME_MAX)?;
    ensure!(is_said(&said, SUCCESS), "the guest did not say `{SUCCESS}`");
    Ok(())
}

/// Makes an authority, and certificates of a server and a client.
fn make_certificates(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    let openssl = find("openssl").context("openssl is not installed; run: cargo xtask setup")?;
    let run = |words: &str| {
        let mut command = Command::new(&openssl);
        run_shown(command.args(words.split_whitespace()).current_dir(directory))
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc";
    run(&format!(
        "req -x509 {key} -keyout ca-key.pem -out ca-cert.pem -subj /CN=authority -days 30"
    ))?;
    for (name, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        run(&format!(
            "req -x509 -CA ca-cert.pem -CAkey ca-key.pem {key} -keyout {name}-key.pem -out {name}-cert.pem -subj /CN={name} \
             -days 30 -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE -addext extendedKeyUsage={usage}"
        ))?;
    }
    Ok(())
}

const TIME_MAX: Duration = Duration::from_secs(180);
const SCRIPT: &str = include_str!("nbd_client/script.sh");
