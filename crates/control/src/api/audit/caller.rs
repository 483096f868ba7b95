//! A caller's user and program. The names are read from /etc/passwd and /proc at each change,
//! because callers are short-lived.

#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct Caller {
    pub(in crate::api) uid: u32,
    pub(in crate::api) pid: Option<i32>,
}

pub(super) struct Names {
    pub(super) user: String,
    pub(super) login: Option<String>,
    pub(super) program: String,
}

impl Caller {
    pub(super) fn names(self) -> Names {
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let of_process = |file: &str| {
            let text = self
                .pid
                .map(|pid| std::fs::read_to_string(format!("/proc/{pid}/{file}")));
            text.and_then(Result::ok)
                .unwrap_or_default()
                .trim()
                .to_owned()
        };
        // The login user, which `sudo` and `su` keep, if it is another one.
        let login = of_process("loginuid").parse().ok();
        let login = login.filter(|uid| *uid != u32::MAX && *uid != self.uid);
        Names {
            user: user_name(&users, self.uid),
            login: login.map(|uid| user_name(&users, uid)),
            program: of_process("comm"),
        }
    }
}

/// By passwd(5): `name:password:uid:...`.
fn user_name(users: &str, uid: u32) -> String {
    let name = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    });
    name.unwrap_or_else(|| format!("uid {uid}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_names() {
        let users = "root:x:0:0:root:/root:/bin/bash\nann:x:1000:1000::/home/ann:/bin/sh\nbad\n";
        assert_eq!(user_name(users, 1000), "ann");
        assert_eq!(user_name(users, 7), "uid 7");
    }
}
