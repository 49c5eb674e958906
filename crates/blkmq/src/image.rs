//! Makes, describes, checks and converts qcow2 images: the driver's own view of them. No daemon takes part.

mod convert;

use std::path::PathBuf;

use anyhow::{Result, bail};
use blkmq_drivers::qcow2::{self, BaseFormat, Link, NewImage, Survey};
use blkmq_host::value;
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use self::convert::ConvertArgs;
use crate::stdout::{print, unless_reader_left};

/// What `image` takes.
#[derive(Debug, Args)]
pub struct ImageArgs {
    /// What to do
    #[command(subcommand)]
    pub action: Action,
}

/// The commands on images.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Make an image, empty or on a base
    Create(CreateArgs),
    /// Describe an image and all that it lies on
    Info(InfoArgs),
    /// Compare the refcounts of an image with what its tables use
    Check(CheckArgs),
    /// Copy a disk to a file of another format, or without its bases
    Convert(ConvertArgs),
}

/// What `image create` takes.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Where; there must be nothing yet
    pub path: PathBuf,
    /// Size of the disk, as 20G [default: that of the base]
    #[arg(value_parser = size)]
    pub size: Option<u64>,
    /// Lay it on this raw disk
    #[arg(long, value_name = "PATH", conflicts_with = "base")]
    pub raw_base: Option<PathBuf>,
    /// Lay it on this image
    #[arg(long, value_name = "PATH")]
    pub base: Option<PathBuf>,
    /// Size of a cluster, a power of two from 512 to 2M [default: 64K]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub cluster: Option<u64>,
    /// Give each cluster 32 subclusters: a first write copies less of the base
    #[arg(long)]
    pub subclusters: bool,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

/// What `image info` takes.
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// The image
    pub path: PathBuf,
    /// Directories below which its bases may be; may be given again [default: the image's own]
    #[arg(long = "dir", value_name = "PATH")]
    pub directories: Vec<PathBuf>,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

/// What `image check` takes.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The image, which nobody may have open for writing
    pub path: PathBuf,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

/// Carries out one of the commands.
///
/// # Errors
/// The image cannot be used, or is corrupt.
pub fn main(args: &ImageArgs) -> Result<()> {
    match &args.action {
        Action::Create(args) => create(args),
        Action::Info(args) => info(args),
        Action::Check(args) => check(args),
        Action::Convert(args) => convert::main(args),
    }
}

fn create(args: &CreateArgs) -> Result<()> {
    let base = |path: &Option<PathBuf>, format| path.clone().map(|path| (path, format));
    let new = NewImage {
        path: args.path.clone(),
        size: args.size,
        cluster: args.cluster.map(|bytes| u32::try_from(bytes).unwrap_or(u32::MAX)),
        has_subclusters: args.subclusters,
        base: base(&args.base, BaseFormat::Qcow2).or_else(|| base(&args.raw_base, BaseFormat::Raw)),
    };
    let size = new.create()?;
    let text = match args.json {
        true => format!("{}\n", json!({ "path": args.path, "size": size })),
        false => format!("{}: a disk of {size} bytes\n", args.path.display()),
    };
    unless_reader_left(print(&text))
}

fn info(args: &InfoArgs) -> Result<()> {
    let links = qcow2::look(&args.path, &args.directories)?;
    let text = match args.json {
        true => format!(
            "{}\n",
            json!({ "chain": links.iter().map(object).collect::<Vec<_>>() })
        ),
        false => links.iter().map(lines).collect(),
    };
    unless_reader_left(print(&text))
}

fn check(args: &CheckArgs) -> Result<()> {
    let Survey {
        errors,
        leaks,
        used,
        data,
        zeroes,
    } = qcow2::check_refcounts(&args.path)?;
    let text = match args.json {
        true => {
            let found =
                json!({ "errors": errors, "leaks": leaks, "used": used, "data": data, "zeroes": zeroes });
            format!("{found}\n")
        }
        false => format!(
            "errors: {errors}\nleaked clusters: {leaks}\nclusters: {used} used, {data} with data, {zeroes} of zeroes\n"
        ),
    };
    unless_reader_left(print(&text))?;
    if errors > 0 {
        bail!(
            "{:?}: {errors} errors: repair it with `qemu-img check -r all`, or restore it",
            args.path
        );
    }
    Ok(())
}

fn object(link: &Link) -> Value {
    let mut object =
        json!({ "path": link.path, "format": "raw", "end": link.end, "allocated": link.allocated });
    let Some(header) = &link.header else { return object };
    object["format"] = json!("qcow2");
    object["version"] = json!(header.version);
    object["size"] = json!(header.size);
    object["cluster"] = json!(header.cluster());
    object["refcount_bits"] = json!(1 << header.refcount_order);
    object["snapshots"] = json!(header.snapshots);
    object["backing"] = json!(header.backing);
    object["data_file"] = json!(header.data_file);
    object
}

fn lines(link: &Link) -> String {
    let path = link.path.display();
    let Some(header) = &link.header else {
        return format!("{path}: raw, {} bytes, {} allocated\n", link.end, link.allocated);
    };
    let mut text = format!(
        "{path}: qcow2 version {}, a disk of {} bytes in clusters of {}, {} allocated\n",
        header.version,
        header.size,
        header.cluster(),
        link.allocated
    );
    if header.snapshots > 0 {
        text += &format!("  snapshots inside: {}\n", header.snapshots);
    }
    if let Some(name) = &header.data_file {
        text += &format!("  data file: {name}\n");
    }
    if let Some(name) = &header.backing {
        let format = header.backing_format.as_deref().unwrap_or("not named");
        text += &format!("  on: {name} ({format})\n");
    }
    text
}

fn size(text: &str) -> Result<u64, String> {
    value::size("size", text).map_err(|error| error.to_string())
}
