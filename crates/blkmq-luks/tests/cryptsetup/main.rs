//! Images that `cryptsetup` has formatted open here, in each variant; what it has encrypted is decrypted;
//! what is damaged or not supported is refused in clear words. `cryptsetup` formats files without root.

mod image;

use std::fs::File;
use std::os::unix::fs::FileExt;

use blkmq_luks::{Header, LuksError, Secret, VolumeKey, Xts};

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
