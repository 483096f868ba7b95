//! Arguments for VM monitors (QEMU, cloud-hypervisor, libvirt) to attach an export, with the
//! quoting that each needs.

use forebay_control::model::error::ErrorKind;
use forebay_control::model::{Export, ExportFrontend};

use crate::failure::{Failure, Outcome};

fn shell(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=,@+%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// For an attribute in single quotes.
fn xml(value: &str) -> String {
    value
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('\'', "&apos;")
}

/// cloud-hypervisor's options end at a comma.
fn cloud_value(value: &str) -> String {
    let plain = !value.contains([',', '[', ']']);
    if plain {
        value.to_owned()
    } else {
        format!("\"{value}\"")
    }
}

/// Monitors do not refuse it (QEMU 11.1 with `migrate exec:`).
const NOT_MIGRATED: &str = "A VM with this disk must not be migrated, nor saved and restored: \
                            it hangs at its next read.";

struct Words {
    qemu: Vec<String>,
    cloud: String,
    namespace: &'static str,
    device: String,
}

pub(crate) fn attach_text(export: &Export) -> Option<String> {
    let path = export.socket.as_deref()?;
    let words = match export.frontend {
        ExportFrontend::NvmeTcp => return None,
        ExportFrontend::NvmePcie => nvme_pcie(path),
        ExportFrontend::VhostUser => vhost_user(export, path),
    };
    let mut text = format!(
        "\n{NOT_MIGRATED}\n\nThe VM must share its memory with Forebay; these examples use 4 GiB. QEMU:\n  \
         -object memory-backend-memfd,id=mem,size=4G,share=on -machine memory-backend=mem\n",
    );
    for line in words.qemu {
        text.push_str(&format!("  {line}\n"));
    }
    text.push_str(&format!(
        "cloud-hypervisor:\n  --memory size=4G,shared=on\n  {}\n",
        words.cloud
    ));
    if export.frontend == ExportFrontend::NvmePcie {
        match path.strip_suffix("/cntrl") {
            Some(folder) => text.push_str(&format!("SPDK:\n  trtype:VFIOUSER traddr:{folder}\n")),
            None => text.push_str("SPDK needs an export created with --vm-socket FOLDER/cntrl\n"),
        }
    }
    text.push_str(&format!(
        "libvirt (for the domain's XML):\n  <domain type='kvm'{}>\n    <memoryBacking>\n      \
         <source type='memfd'/>\n      <access mode='shared'/>\n    </memoryBacking>\n    \
         {}\n  </domain>\n",
        words.namespace, words.device
    ));
    Some(text)
}

fn nvme_pcie(path: &str) -> Words {
    let device = serde_json::json!({
        "driver": "vfio-user-pci",
        "socket": { "type": "unix", "path": path },
    });
    let device = device.to_string();
    Words {
        qemu: vec![format!("-device {}", shell(&device))],
        cloud: format!(
            "--user-device {}",
            shell(&format!("socket={}", cloud_value(path)))
        ),
        // libvirt does not know this device yet.
        namespace: " xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'",
        device: format!(
            "<qemu:commandline>\n      <qemu:arg value='-device'/>\n      \
             <qemu:arg value='{}'/>\n    </qemu:commandline>",
            xml(&device)
        ),
    }
}

fn vhost_user(export: &Export, path: &str) -> Words {
    let (id, queues) = (export.id, export.queues);
    // In QEMU's options, a doubled comma is a literal one.
    let option = path.replace(',', ",,");
    let socket = format!("socket,id=forebay{id},path={option},reconnect-ms=1000");
    Words {
        qemu: vec![
            format!("-chardev {}", shell(&socket)),
            format!("-device vhost-user-blk-pci,chardev=forebay{id},num-queues={queues}"),
        ],
        cloud: format!(
            "--disk {}",
            shell(&format!(
                "vhost_user=true,socket={},num_queues={queues},queue_size=256",
                cloud_value(path)
            ))
        ),
        namespace: "",
        device: format!(
            "<devices>\n      <disk type='vhostuser' device='disk'>\n        \
             <driver name='qemu' type='raw' queues='{queues}'/>\n        \
             <source type='unix' path='{}'>\n          \
             <reconnect enabled='yes' timeout='1'/>\n        </source>\n        \
             <target dev='vdb' bus='virtio'/>\n      </disk>\n    </devices>",
            xml(path)
        ),
    }
}

/// By name or number. `file` reads /etc/passwd and /etc/group.
fn ids(
    text: &str,
    file: impl Fn(&str) -> std::io::Result<String>,
) -> Outcome<(Option<u32>, Option<u32>)> {
    let (user, group) = text.split_once(':').unwrap_or((text, ""));
    let id = |name: &str, what: &str, path: &str| {
        if name.is_empty() {
            return Ok(None);
        }
        if let Ok(number) = name.parse::<u32>() {
            return Ok(Some(number));
        }
        let names = file(path).map_err(|error| Failure::new(format!("{path}: {error}")))?;
        let found = names.lines().find_map(|line| {
            let mut fields = line.split(':');
            (fields.next()? == name).then(|| fields.nth(1)?.parse::<u32>().ok())?
        });
        match found {
            Some(number) => Ok(Some(number)),
            None => Err(Failure::refused(
                ErrorKind::NotFound,
                format!("there is no {what} {name} in {path}"),
            )
            .hint(format!(
                "use the {what}'s number (`getent {} {name}`)",
                path.trim_start_matches("/etc/")
            ))),
        }
    };
    match (
        id(user, "user", "/etc/passwd")?,
        id(group, "group", "/etc/group")?,
    ) {
        (None, None) => Err(Failure::invalid("an owner is USER, USER:GROUP or :GROUP")),
        both => Ok(both),
    }
}

pub(crate) fn owner_ids(text: &str) -> Outcome<(Option<u32>, Option<u32>)> {
    ids(text, |path| std::fs::read_to_string(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(frontend: ExportFrontend, path: &str) -> Export {
        Export {
            tenant: "acme".into(),
            volume: "db".into(),
            id: 7,
            frontend,
            mapped_doorbells: false,
            queues: 4,
            pinned_memory: false,
            socket: Some(path.into()),
            machine: None,
            shared: false,
            read_only: false,
            internal: false,
            nqn: "nqn.x".into(),
            nsid: 1,
            hosts: vec![],
            any_host: false,
            addresses: vec![],
            connected_hosts: vec![],
            quarantined: None,
            commands_ending: 0,
            warnings: Vec::new(),
            reactor: None,
        }
    }

    #[test]
    fn each_monitor_gets_its_own_words() {
        let text = attach_text(&export(ExportFrontend::NvmePcie, "/run/m/db.sock")).unwrap();
        let device = r#"-device '{"driver":"vfio-user-pci","socket":{"path":"/run/m/db.sock","type":"unix"}}'"#;
        assert!(text.contains(device), "{text}");
        assert!(text.contains("--user-device socket=/run/m/db.sock\n"));
        assert!(text.contains("--vm-socket FOLDER/cntrl"));
        let in_folder = attach_text(&export(ExportFrontend::NvmePcie, "/run/m/db/cntrl")).unwrap();
        assert!(in_folder.contains("trtype:VFIOUSER traddr:/run/m/db\n"));
        assert!(text.contains("<qemu:arg value='-device'/>"));
        assert!(text.contains("must not be migrated"));
        let text = attach_text(&export(ExportFrontend::VhostUser, "/run/m/db.sock")).unwrap();
        assert!(text.contains("must not be migrated"));
        assert!(
            text.contains("-chardev socket,id=forebay7,path=/run/m/db.sock,reconnect-ms=1000\n")
        );
        assert!(text.contains("-device vhost-user-blk-pci,chardev=forebay7,num-queues=4\n"));
        assert!(text.contains(
            "--disk vhost_user=true,socket=/run/m/db.sock,num_queues=4,queue_size=256\n"
        ));
        assert!(text.contains("<source type='unix' path='/run/m/db.sock'>"));
        let odd = attach_text(&export(ExportFrontend::VhostUser, "/a b,c'<&")).unwrap();
        assert!(odd.contains(r"path=/a b,,c'\''<&,reconnect"), "{odd}");
        assert!(odd.contains("path='/a b,c&apos;&lt;&amp;'"), "{odd}");
        assert!(odd.contains(r#"socket="/a b,c'\''<&",num"#), "{odd}");
        assert!(attach_text(&export(ExportFrontend::NvmeTcp, "/x")).is_none());
    }

    /// A strict XML parser: element names with their parents.
    fn parse(xml: &str) -> Vec<String> {
        let (mut open, mut seen) = (Vec::new(), Vec::new());
        let mut rest = xml.trim();
        while !rest.is_empty() {
            let tag = rest.strip_prefix('<').expect("text is between no elements");
            let mut quoted = false;
            let end = tag.find(|c| {
                quoted ^= c == '\'';
                c == '>' && !quoted
            });
            let (tag, after) = tag.split_at(end.expect("a tag ends"));
            rest = after[1..].trim_start();
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name));
                continue;
            }
            let (tag, is_empty) = match tag.strip_suffix('/') {
                Some(tag) => (tag, true),
                None => (tag, false),
            };
            let (name, mut attributes) = tag.split_once(' ').unwrap_or((tag, ""));
            while !attributes.is_empty() {
                let (key, value) = attributes.split_once("='").expect("a value");
                assert!(key.chars().all(|c| c.is_ascii_alphabetic() || c == ':'));
                let (value, more) = value.split_once('\'').expect("the value ends");
                assert!(!value.contains('<'), "{value}");
                for entity in value.split('&').skip(1) {
                    let known = ["amp;", "lt;", "apos;"];
                    assert!(known.iter().any(|k| entity.starts_with(k)), "{entity}");
                }
                attributes = more.trim_start();
            }
            if name.contains(':') {
                assert!(xml.contains("xmlns:qemu="), "{name}");
            }
            seen.push(format!("{}/{name}", open.join("/")));
            if !is_empty {
                open.push(name.to_owned());
            }
        }
        assert!(open.is_empty(), "{open:?}");
        seen
    }

    #[test]
    fn libvirt_snippets_are_well_formed_xml() {
        for path in ["/run/m/db.sock", "/a b,c'<&>\"", "/ü"] {
            for (frontend, device) in [
                (ExportFrontend::NvmePcie, "domain/qemu:commandline/qemu:arg"),
                (
                    ExportFrontend::VhostUser,
                    "domain/devices/disk/source/reconnect",
                ),
            ] {
                let text = attach_text(&export(frontend, path)).unwrap();
                let at = text.find("<domain").unwrap();
                let seen = parse(&text[at..]);
                assert!(seen.contains(&device.to_owned()), "{seen:?}");
                assert!(seen.contains(&"domain/memoryBacking/access".to_owned()));
            }
        }
    }

    #[test]
    fn an_owner_is_found_by_name_or_number() {
        let file = |path: &str| {
            Ok(match path {
                "/etc/passwd" => "root:x:0:0::/:/sh\nqemu:x:107:36::/:/no\n".to_owned(),
                _ => "kvm:x:36:qemu\n".to_owned(),
            })
        };
        assert_eq!(ids("qemu:kvm", file).unwrap(), (Some(107), Some(36)));
        assert_eq!(ids("5", file).unwrap(), (Some(5), None));
        assert_eq!(ids(":kvm", file).unwrap(), (None, Some(36)));
        for bad in ["", ":", "nobody", "qemu:nobody", "-1"] {
            assert!(ids(bad, file).is_err(), "{bad}");
        }
    }
}
