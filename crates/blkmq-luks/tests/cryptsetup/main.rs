//! Images that `cryptsetup` has formatted open here, in each variant; what it has encrypted is decrypted;
//! what is damaged or not supported is refused in clear words. `cryptsetup` formats files without root.

mod image;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use blkmq_luks::{Header, LuksError, ReadAt, Secret, VolumeKey, Xts};

use self::image::{Image, PASSPHRASE, has_cryptsetup};

fn key() -> Secret {
    Secret::take(&mut PASSPHRASE.to_vec()).unwrap()
}

fn open(image: &Image) -> Result<(Header, VolumeKey), LuksError> {
    let mut file = File::open(image.header()).unwrap();
    let header = Header::read(&mut file)?;
    let key = header.unlock(&key(), &mut file)?;
    Ok((header, key))
}

fn refusal(image: &Image) -> String {
    open(image).map(|(header, _)| header).unwrap_err().to_string()
}

/// The variants that `cryptsetup` 2.6 can write and this crate reads.
const VARIANTS: &[&str] = &[
    "--type luks1",
    "--type luks1 --key-size 256 --hash sha1",
    "--type luks1 --hash sha512",
    "--type luks2 --pbkdf pbkdf2",
    "--type luks2 --pbkdf pbkdf2 --hash sha512 --key-size 256 --sector-size 512",
    "--type luks2 --pbkdf argon2i --sector-size 2048",
    "--type luks2 --pbkdf argon2id --sector-size 4096 --luks2-metadata-size 64k",
];

#[test]
fn images_of_each_variant_open_with_the_volume_key_that_cryptsetup_shows() {
    if !has_cryptsetup() {
        return;
    }
    for variant in VARIANTS {
        let image = Image::formatted(variant);
        let (header, key) = open(&image).unwrap_or_else(|error| panic!("{variant}: {error}"));
        assert_eq!(key.bytes(), image.volume_key(), "{variant}");
        assert_eq!(header.uuid, image.uuid(), "{variant}");
        assert_eq!(header.warning, None, "{variant}");
        header.check_key(&key).unwrap();
        let sector = variant.split_once("--sector-size ").map(|(_, rest)| &rest[..3]);
        assert!(sector.is_none_or(|digits| header.payload.sector.to_string().starts_with(digits)));
    }
}

#[test]
fn data_that_cryptsetup_has_encrypted_is_decrypted() {
    if !has_cryptsetup() {
        return;
    }
    for sector in [512, 4096] {
        let plain: Vec<u8> = (0..DATA_BYTES / 512)
            .flat_map(|at| [(at % 251) as u8; 512])
            .collect();
        let image = Image::encrypted(
            &plain,
            &format!("--type luks2 --pbkdf pbkdf2 --sector-size {sector}"),
        );
        let (header, key) = open(&image).unwrap();
        assert_eq!(header.payload.sector, sector);
        let xts = Xts::new(key.bytes(), sector).unwrap();
        let mut data = vec![0; plain.len()];
        let file = File::open(image.data()).unwrap();
        file.read_exact_at(&mut data, header.payload.offset).unwrap();
        assert_ne!(data, plain);
        xts.decrypt(header.payload.first_sector, &mut data);
        assert!(data == plain, "sectors of {sector}");
    }
}

#[test]
fn slots_that_were_added_and_removed_by_cryptsetup_are_found() {
    if !has_cryptsetup() {
        return;
    }
    for variant in ["--type luks1", "--type luks2 --pbkdf pbkdf2"] {
        let image = Image::formatted(variant);
        image.add_key("another passphrase", 5);
        let (header, key) = open(&image).unwrap();
        let mut file = File::open(image.header()).unwrap();
        let another = Secret::take(&mut b"another passphrase".to_vec()).unwrap();
        assert_eq!(header.unlock(&another, &mut file).unwrap().bytes(), key.bytes());
        image.remove_slot(0);
        assert_eq!(refusal(&image), "no key slot opens with this key");
        let header = Header::read(&mut file).unwrap();
        assert_eq!(header.unlock(&another, &mut file).unwrap().bytes(), key.bytes());
    }
}

#[test]
fn detached_header_has_its_data_at_the_start_of_the_disk() {
    if !has_cryptsetup() {
        return;
    }
    for variant in ["--type luks1", "--type luks2 --pbkdf pbkdf2"] {
        let image = Image::detached(variant);
        let (header, _) = open(&image).unwrap();
        assert_eq!(header.payload.offset, 0, "{variant}");
    }
}

#[test]
fn one_damaged_copy_is_named_and_two_are_refused() {
    if !has_cryptsetup() {
        return;
    }
    let image = Image::formatted("--type luks2 --pbkdf pbkdf2");
    let whole = image.bytes();
    let cases: [(&[usize], Option<&str>); 4] = [
        (
            &[5000],
            Some("the first copy of the LUKS header is damaged; cryptsetup repair restores it"),
        ),
        (
            &[0],
            Some("the first copy of the LUKS header is damaged; cryptsetup repair restores it"),
        ),
        (
            &[16384 + 5000],
            Some("the second copy of the LUKS header is damaged; cryptsetup repair restores it"),
        ),
        (&[5000, 16384 + 5000], None),
    ];
    for (places, warning) in cases {
        image.write(&whole);
        places.iter().for_each(|place| image.flip(*place));
        match warning {
            Some(_) => assert_eq!(open(&image).unwrap().0.warning.as_deref(), warning, "{places:?}"),
            None => assert!(
                refusal(&image).contains("damaged: both copies"),
                "{}",
                refusal(&image)
            ),
        }
    }
}

#[test]
fn other_formats_are_refused_by_name() {
    if !has_cryptsetup() {
        return;
    }
    let cases = [
        (
            "--type luks2 --pbkdf pbkdf2 --cipher aes-cbc-essiv:sha256",
            "the cipher \"aes-cbc-essiv:sha256\"",
        ),
        (
            "--type luks1 --cipher serpent-xts-plain64",
            "the cipher \"serpent-xts-plain64\"",
        ),
        ("--type luks1 --hash ripemd160", "the hash \"ripemd160\""),
    ];
    for (variant, what) in cases {
        let Some(image) = Image::try_formatted(variant) else {
            continue;
        };
        assert!(refusal(&image).contains(what), "{variant}: {}", refusal(&image));
    }
    let empty = Image::empty();
    assert!(
        refusal(&empty).starts_with("there is no LUKS header"),
        "{}",
        refusal(&empty)
    );
}

#[test]
fn refusal_names_what_asks_for_too_much_and_fits_the_requirement() {
    if !has_cryptsetup() {
        return;
    }
    // Its slots have passes instead.
    let image = Image::formatted("--type luks2 --pbkdf argon2id");
    let whole = image.bytes();
    for (from, to, why) in [
        (
            "\"iterations\":",
            "\"iterations\":99999",
            "its digest asks for PBKDF2 iterations 99999",
        ),
        (
            "\"config\":{",
            "\"config\":{\"requirements\":{\"mandatory\":[\"new\"]},",
            "the requirement \"new\", which is not supported: supported are none",
        ),
        (
            "\"config\":{",
            "\"config\":{\"requirements\":{\"mandatory\":[\"online-reencrypt-v2\"]},",
            "finish a reencryption",
        ),
    ] {
        image.write(&whole);
        image.replace_first_in_json(from, to);
        let refused = refusal(&image);
        assert!(refused.contains(why), "{to}: {refused}");
    }
}

#[test]
fn slot_that_cannot_be_used_leaves_the_others() {
    if !has_cryptsetup() {
        return;
    }
    let kinds = [
        (
            "\"type\":\"argon2id\"",
            "\"type\":\"scrypt\"",
            "the key derivation \"scrypt\"",
        ),
        ("\"time\":4", "\"time\":70000", "Argon2 passes 70000"),
        ("\"key_size\":64", "\"key_size\":48", "a key of 48 bytes"),
        ("\"stripes\":4000", "\"stripes\":0", "has 0 stripes"),
        (
            "\"type\":\"raw\"",
            "\"type\":\"datashift\"",
            "the types \"luks1\" and \"datashift\"",
        ),
        ("\"salt\":\"", "\"salt\":\"!", "no base64"),
        ("\"kdf\":", "\"kdf \":", "its JSON"),
    ];
    let image = Image::formatted("--type luks2 --pbkdf argon2id");
    image.add_key("another passphrase", 5);
    let (_, key) = open(&image).unwrap();
    let whole = image.bytes();
    let another = Secret::take(&mut b"another passphrase".to_vec()).unwrap();
    for (from, to, why) in kinds {
        image.write(&whole);
        image.replace_first_in_json(from, to);
        let mut file = File::open(image.header()).unwrap();
        let header = Header::read(&mut file).unwrap_or_else(|error| panic!("{to}: {error}"));
        let opened = header
            .unlock(&another, &mut file)
            .unwrap_or_else(|error| panic!("{to}: {error}"));
        assert_eq!(opened.bytes(), key.bytes(), "{to}");
        let refused = refusal(&image);
        assert!(
            refused.starts_with("no key slot opens with this key; not tried: slot \"0\": ")
                && refused.contains(why),
            "{to}: {refused}"
        );
    }
    let image = Image::formatted("--type luks1");
    image.add_key("another passphrase", 5);
    let whole = image.bytes();
    // The state of the first slot, the most significant byte of its iterations, and its stripes.
    for (place, why) in [
        (208, "has the state"),
        (212, "PBKDF2 iterations"),
        (253, "stripes"),
    ] {
        image.write(&whole);
        image.flip(place);
        let mut file = File::open(image.header()).unwrap();
        let header = Header::read(&mut file).unwrap_or_else(|error| panic!("{place}: {error}"));
        header
            .unlock(&another, &mut file)
            .unwrap_or_else(|error| panic!("{place}: {error}"));
        let refused = refusal(&image);
        assert!(
            refused.starts_with("no key slot opens with this key; not tried: slot 0: ")
                && refused.contains(why),
            "{place}: {refused}"
        );
    }
}

#[test]
fn slot_whose_area_cannot_be_read_leaves_the_others() {
    if !has_cryptsetup() {
        return;
    }
    let image = Image::formatted("--type luks2 --pbkdf pbkdf2");
    image.add_key("another passphrase", 1);
    let another = Secret::take(&mut b"another passphrase".to_vec()).unwrap();
    let mut medium = Medium {
        bytes: image.bytes(),
        // The area of the first slot.
        bad: 32 << 10..33 << 10,
    };
    let header = Header::read(&mut medium).unwrap();
    header.unlock(&another, &mut medium).unwrap();
    let refused = header.unlock(&key(), &mut medium).unwrap_err().to_string();
    assert!(
        refused.contains("not tried: slot \"0\": its LUKS header cannot be read"),
        "{refused}"
    );
}

#[test]
fn copy_that_cannot_be_read_or_makes_no_sense_is_replaced_by_the_other() {
    if !has_cryptsetup() {
        return;
    }
    let image = Image::formatted("--type luks2 --pbkdf pbkdf2");
    let bytes = image.bytes();
    for (bad, which) in [
        (0..512, "first"),
        (8192..8704, "first"),
        (16384 + 512..20480, "second"),
    ] {
        let mut medium = Medium {
            bytes: bytes.clone(),
            bad,
        };
        let header = Header::read(&mut medium).unwrap();
        let warning = header.warning.as_deref().unwrap_or_default();
        assert!(
            warning.starts_with(&format!("the {which} copy of the LUKS header is damaged")),
            "{warning}"
        );
        header.unlock(&key(), &mut medium).unwrap();
    }
    image.replace_json_of(&[0], "\"segments\":", "\"segment \":");
    assert!(
        open(&image)
            .unwrap()
            .0
            .warning
            .unwrap()
            .starts_with("the first copy")
    );
    image.replace_json_of(&[1], "\"segments\":", "\"segment \":");
    let refused = refusal(&image);
    assert!(
        refused.contains("both copies; the first one has a right checksum, but its JSON"),
        "{refused}"
    );
}

/// A header on a medium of which some bytes cannot be read.
struct Medium {
    bytes: Vec<u8>,
    bad: Range<u64>,
}

impl ReadAt for Medium {
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let end = offset + bytes.len() as u64;
        match offset < self.bad.end && self.bad.start < end {
            true => Err(io::Error::from_raw_os_error(5)),
            false => (&self.bytes[..]).read_at(offset, bytes),
        }
    }
}

#[test]
fn slot_that_asks_for_too_much_memory_is_refused_before_it_is_taken() {
    if !has_cryptsetup() {
        return;
    }
    let image = Image::formatted("--type luks2 --pbkdf argon2id");
    image.replace_json("\"memory\":32,", "\"memory\":99999999,");
    let refused = refusal(&image);
    assert!(
        refused.contains("Argon2 memory in KiB 99999999, more than 4194304"),
        "{refused}"
    );
}

const DATA_BYTES: usize = 1 << 20;
