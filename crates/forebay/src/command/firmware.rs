//! `forebay firmware`: images, and the slots of a running daemon.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_control::firmware::image::{
    Description, PROGRAM_MAX_BYTES, SigningKey, VerifyingKey, seal, verify,
};
use forebay_control::model::Done;
use forebay_control::model::firmware::{FirmwareActivate, FirmwareInstall, FirmwareSlots};
use serde::Serialize;

use crate::cli::FirmwareCommand;
use crate::context::Context;
use crate::failure::{Failure, Outcome, While};
use crate::output::{Output, pairs};

pub(crate) fn firmware(
    output: Output,
    command: FirmwareCommand,
    context: impl FnOnce() -> Outcome<Context>,
) -> Outcome {
    let (path, body) = match command {
        FirmwareCommand::NewKey { file } => return new_key(output, &file),
        FirmwareCommand::Sign {
            key,
            program,
            image,
        } => return sign(output, &key, program, &image),
        FirmwareCommand::Show { image, key } => return show(output, &image, key.as_deref()),
        FirmwareCommand::Slots => {
            let slots: FirmwareSlots = context()?.client.get("/v1/firmware")?;
            return output.show(&slots, slots_text);
        }
        FirmwareCommand::Install {
            image,
            at_next_start,
        } => {
            let image = std::path::absolute(&image).while_doing("find the image")?;
            let path = image
                .to_str()
                .ok_or_else(|| Failure::new("the image's path is not UTF-8"))?;
            let body = FirmwareInstall {
                path: path.to_owned(),
                at_next_start,
            };
            ("/v1/firmware/install", serde_json::to_value(body))
        }
        FirmwareCommand::Activate {
            slot,
            at_next_start,
        } => {
            let body = FirmwareActivate {
                slot,
                at_next_start,
            };
            ("/v1/firmware/activate", serde_json::to_value(body))
        }
    };
    let body = body.while_doing("write the request")?;
    let done: Done = context()?.client.post(path, &body)?;
    output.done(&done)
}

fn new_key(output: Output, file: &Path) -> Outcome {
    let key = SigningKey::generate().while_doing("make a key")?;
    let mut public_file = file.as_os_str().to_owned();
    public_file.push(".pub");
    let public_file = PathBuf::from(public_file);
    for (path, mode, text) in [
        (file, 0o600, key.to_pem()),
        (&public_file, 0o644, key.public().to_pem()),
    ] {
        let mut options = OpenOptions::new();
        let made = options.write(true).create_new(true).mode(mode).open(path);
        made.and_then(|mut made| made.write_all(text.as_bytes()))
            .while_doing(format!("make {}", path.display()))?;
    }
    output.done(&Done {
        done: format!(
            "{} signs images, and {} verifies them",
            file.display(),
            public_file.display()
        ),
    })
}

/// Runs the program for its own answer.
fn ask(program: &Path, argument: &str) -> Outcome<String> {
    let doing = || format!("run {} {argument}", program.display());
    let said = Command::new(program)
        .arg(argument)
        .output()
        .while_doing(doing())?;
    if !said.status.success() {
        return Err(Failure::new(format!(
            "can't {}: it ended with {}",
            doing(),
            said.status
        )));
    }
    let text = String::from_utf8_lossy(&said.stdout);
    Ok(text
        .split_whitespace()
        .last()
        .unwrap_or_default()
        .to_owned())
}

fn read_program(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut program = Vec::new();
    File::open(path)?
        .take(PROGRAM_MAX_BYTES + 1)
        .read_to_end(&mut program)?;
    Ok(program)
}

fn sign(output: Output, key: &Path, program: Option<PathBuf>, image: &Path) -> Outcome {
    let signing = SigningKey::read(key).while_doing(format!("use the key {}", key.display()))?;
    let program = match program {
        Some(program) => std::path::absolute(program).while_doing("find the program")?,
        None => std::env::current_exe().while_doing("find this program's executable")?,
    };
    let (version, formats) = (ask(&program, "--version")?, ask(&program, "formats")?);
    let bytes = read_program(&program).while_doing(format!("read {}", program.display()))?;
    let sealed = seal(bytes, &version, &formats, &signing).while_doing("make the image")?;
    std::fs::write(image, sealed).while_doing(format!("write {}", image.display()))?;
    output.done(&Done {
        done: format!(
            "{} has version {version}, with formats {formats}",
            image.display()
        ),
    })
}

#[derive(Serialize)]
struct Shown {
    version: String,
    formats: String,
    program_bytes: u64,
    /// Whether the signature was verified.
    verified: bool,
}

fn show(output: Output, image: &Path, key: Option<&Path>) -> Outcome {
    let doing = format!("use the image {}", image.display());
    let mut file = File::open(image).while_doing(&doing)?;
    let described = match key {
        Some(key) => {
            let using = format!("use the key {}", key.display());
            let key = VerifyingKey::read(key).while_doing(using)?;
            verify(&mut file, &[key])
        }
        None => Description::read(&mut file),
    };
    let described = described.while_doing(doing)?;
    let shown = Shown {
        version: described.version,
        formats: described.formats,
        program_bytes: described.program_bytes,
        verified: key.is_some(),
    };
    let signature = match shown.verified {
        true => "valid",
        false => "not verified (see --key)",
    };
    output.show(&shown, |shown| {
        pairs(vec![
            ("version", shown.version.clone()),
            ("formats", shown.formats.clone()),
            ("program", format!("{} bytes", shown.program_bytes)),
            ("signature", signature.to_owned()),
        ])
    })
}

fn slots_text(slots: &FirmwareSlots) -> String {
    let number = |slot: Option<u8>| slot.map_or_else(|| "none".to_owned(), |slot| slot.to_string());
    let mut rows: Vec<(&str, String)> = Vec::new();
    for slot in &slots.slots {
        let name = if slot.slot == 1 { "slot 1" } else { "slot 2" };
        let version = slot.version.clone();
        rows.push((name, version.unwrap_or_else(|| "none".to_owned())));
    }
    rows.push(("running", number(slots.running)));
    rows.push(("next start", number(Some(slots.next))));
    if let Some(left) = &slots.fell_back {
        rows.push(("failed", left.clone()));
    }
    pairs(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_signed_program_is_shown_with_the_key_that_verifies_it() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let output = Output { json: true };
        new_key(output, &at("a")).unwrap();
        new_key(output, &at("b")).unwrap();
        assert!(
            new_key(output, &at("a")).is_err(),
            "a key is not overwritten"
        );
        assert_eq!(
            at("a").metadata().unwrap().permissions().mode() & 0o777,
            0o600
        );
        let script =
            "#!/bin/sh\ncase $1 in --version) echo forebay 7.8.9;; formats) echo 1.2;; esac\n";
        std::fs::write(at("program"), script).unwrap();
        std::fs::set_permissions(at("program"), PermissionsExt::from_mode(0o700)).unwrap();
        sign(output, &at("a"), Some(at("program")), &at("image")).unwrap();
        let described = Description::read(&mut File::open(at("image")).unwrap()).unwrap();
        assert_eq!((&*described.version, &*described.formats), ("7.8.9", "1.2"));
        show(output, &at("image"), None).unwrap();
        show(output, &at("image"), Some(&at("a.pub"))).unwrap();
        let other = show(output, &at("image"), Some(&at("b.pub"))).unwrap_err();
        assert!(other.to_string().contains("another key"), "{other}");
        std::fs::write(at("program"), "#!/bin/sh\nexit 3\n").unwrap();
        let broken = sign(output, &at("a"), Some(at("program")), &at("image")).unwrap_err();
        assert!(broken.to_string().contains("exit status: 3"), "{broken}");
    }
}
