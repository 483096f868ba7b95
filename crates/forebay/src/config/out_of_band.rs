//! `[out_of_band]`: the endpoint for management controllers.

use std::collections::BTreeSet;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use forebay_control::config::{Function, MAX_FUNCTIONS, OutOfBand, Right, Serial};
use forebay_control::model::{ExportFrontend, validate};
use serde::Deserialize;

const DEFAULT_BAUD: u32 = 115_200;
const DEFAULT_TENANT: &str = "out-of-band";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OutOfBandTable {
    serial: String,
    baud: Option<u32>,
    #[serde(default)]
    allow: Vec<String>,
    tenant: Option<String>,
    #[serde(default, rename = "function")]
    functions: Vec<FunctionTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FunctionTable {
    number: Option<u16>,
    #[serde(default)]
    frontend: ExportFrontend,
    #[serde(default)]
    hosts: Vec<String>,
    #[serde(default)]
    any_host: bool,
    socket: Option<String>,
}

/// `base`: the folder of relative paths.
pub(super) fn parse(table: OutOfBandTable, base: &Path) -> Result<OutOfBand, String> {
    let tenant = table.tenant.unwrap_or_else(|| DEFAULT_TENANT.to_owned());
    validate::name("tenant", &tenant).map_err(|error| format!("[out_of_band] tenant: {error}"))?;
    Ok(OutOfBand {
        serial: serial(&table.serial, table.baud, base)?,
        allow: rights(&table.allow)?,
        tenant,
        functions: functions(table.functions)?,
    })
}

/// `unix:PATH`, `tty:PATH`, `pty:PATH`, or a path: of a terminal that exists, or else of a socket.
fn serial(text: &str, baud: Option<u32>, base: &Path) -> Result<Serial, String> {
    let (kind, path) = match text.split_once(':') {
        Some((kind @ ("unix" | "tty" | "pty"), path)) => (kind, path),
        _ => {
            let file = std::fs::metadata(base.join(text));
            let is_terminal = file.is_ok_and(|file| file.file_type().is_char_device());
            (if is_terminal { "tty" } else { "unix" }, text)
        }
    };
    if path.is_empty() {
        return Err(format!(
            "[out_of_band] serial {text:?}: a path is missing; use unix:PATH, tty:PATH or pty:PATH"
        ));
    }
    let path: PathBuf = base.join(path);
    match (kind, baud) {
        ("tty", baud) => Ok(Serial::Terminal {
            path,
            baud: baud.filter(|baud| *baud > 0).unwrap_or(DEFAULT_BAUD),
        }),
        (_, Some(_)) => {
            Err("[out_of_band] baud: only a terminal (tty:PATH) has a speed".to_owned())
        }
        ("pty", None) => Ok(Serial::Pseudoterminal(path)),
        (_, None) => Ok(Serial::Socket(path)),
    }
}

fn rights(names: &[String]) -> Result<BTreeSet<Right>, String> {
    let right = |name: &String| {
        let known = Right::ALL.iter().find(|(_, known)| known == name);
        known.map(|(right, _)| *right).ok_or_else(|| {
            let all: Vec<&str> = Right::ALL.iter().map(|(_, name)| *name).collect();
            format!(
                "[out_of_band] allow: {name:?} is not one of {}",
                all.join(", ")
            )
        })
    };
    names.iter().map(right).collect()
}

fn functions(tables: Vec<FunctionTable>) -> Result<Vec<Function>, String> {
    let mut functions: Vec<Function> = Vec::new();
    for (at, table) in tables.into_iter().enumerate() {
        let place = u16::try_from(at + 1).unwrap_or(u16::MAX);
        let number = table.number.unwrap_or(place);
        let wrong = |why: String| format!("[[out_of_band.function]] {number}: {why}");
        if !(1..=MAX_FUNCTIONS).contains(&number) {
            return Err(wrong(format!(
                "a function's number is 1 to {MAX_FUNCTIONS}"
            )));
        }
        if functions.iter().any(|other| other.number == number) {
            return Err(wrong("another function has this number".to_owned()));
        }
        let is_tcp = table.frontend == ExportFrontend::NvmeTcp;
        let has_hosts = !table.hosts.is_empty() || table.any_host;
        if is_tcp != has_hosts {
            return Err(wrong(match is_tcp {
                true => "no host may use it: name NQNs in `hosts`, or set `any_host`".to_owned(),
                false => "`hosts` and `any_host` are for nvme_tcp only".to_owned(),
            }));
        }
        if is_tcp && table.socket.is_some() {
            return Err(wrong("`socket` is for VMs only".to_owned()));
        }
        validate::host_list(&table.hosts).map_err(|error| wrong(error.to_string()))?;
        functions.push(Function {
            number,
            frontend: table.frontend,
            hosts: table.hosts,
            any_host: table.any_host,
            socket: table.socket,
        });
    }
    functions.sort_by_key(|function| function.number);
    Ok(functions)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<OutOfBand, String> {
        let table = toml::from_str(text).map_err(|error| error.to_string())?;
        parse(table, Path::new("/base"))
    }

    #[test]
    fn everything_said() {
        let config = parsed(
            r#"
            serial = "tty:/dev/ttyS1"
            baud = 9600
            allow = ["namespaces", "firmware"]
            tenant = "bmc"
            [[function]]
            number = 7
            frontend = "nvme_pcie"
            socket = "/run/f7.sock"
            [[function]]
            number = 2
            any_host = true
            "#,
        )
        .unwrap();
        assert_eq!(
            config.serial,
            Serial::Terminal {
                path: "/dev/ttyS1".into(),
                baud: 9600
            }
        );
        assert_eq!(config.allow, [Right::Namespaces, Right::Firmware].into());
        assert_eq!(config.tenant, "bmc");
        let numbers: Vec<u16> = config
            .functions
            .iter()
            .map(|function| function.number)
            .collect();
        assert_eq!(numbers, [2, 7]);
    }

    #[test]
    fn little_said_is_read_only() {
        let config = parsed("serial = \"mctp.sock\"").unwrap();
        assert_eq!(config.serial, Serial::Socket("/base/mctp.sock".into()));
        assert!(config.allow.is_empty() && config.functions.is_empty());
        let terminal = parsed("serial = \"/dev/null\"").unwrap();
        assert!(matches!(
            terminal.serial,
            Serial::Terminal { baud: 115_200, .. }
        ));
        let pty = parsed("serial = \"pty:/x\"").unwrap();
        assert_eq!(pty.serial, Serial::Pseudoterminal("/x".into()));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("", "serial"),
            ("serial = \"tty:\"", "a path is missing"),
            ("serial = \"unix:/x\"\nbaud = 1", "only a terminal"),
            (
                "serial = \"/x\"\nallow = [\"all\"]",
                "not one of namespaces, budgets",
            ),
            ("serial = \"/x\"\ntenant = \"B\"", "tenant"),
            ("serial = \"/x\"\n[[function]]", "no host may use it"),
            (
                "serial = \"/x\"\n[[function]]\nnumber = 0\nany_host = true",
                "1 to 128",
            ),
            (
                "serial = \"/x\"\n[[function]]\nnumber = 2\nany_host = true\n[[function]]\nany_host = true",
                "another function",
            ),
            (
                "serial = \"/x\"\n[[function]]\nfrontend = \"vhost_user\"\nany_host = true",
                "for nvme_tcp only",
            ),
            (
                "serial = \"/x\"\n[[function]]\nhosts = [\"h\"]",
                "function]] 1",
            ),
        ] {
            let message = parsed(text).unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
    }
}
