//! Import cycles between folders of a crate.
//!
//! Each path is resolved through re-exports to the defining file. Files in a cycle must be in one
//! folder, or a folder and its parents.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Item, UseTree};

use super::Source;

/// Maximum chain of re-exports.
const MOST_STEPS: usize = 8;

/// Prints the number of cycles; returns their files.
pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    let packages: BTreeSet<&str> = sources.iter().map(|source| &*source.package).collect();
    for package in packages {
        let files: Vec<&Source> = sources
            .iter()
            .filter(|source| source.package == package)
            .collect();
        for circle in circles(&graph(&files)) {
            if stands_apart(&files, &circle) {
                found.push(describe(&files, &circle));
            }
        }
    }
    super::print("import cycles", found.len(), "a folder");
    found
}

type Graph = Vec<BTreeSet<usize>>;

/// Whether two files are in unrelated folders.
fn stands_apart(files: &[&Source], circle: &[usize]) -> bool {
    let folders: BTreeSet<&Path> = circle.iter().map(|&file| files[file].folder()).collect();
    let mut pairs = folders
        .iter()
        .flat_map(|a| folders.iter().map(move |b| (a, b)));
    pairs.any(|(a, b)| !a.starts_with(b) && !b.starts_with(a))
}

fn describe(files: &[&Source], circle: &[usize]) -> String {
    let names: Vec<String> = circle
        .iter()
        .map(|&file| files[file].path.display().to_string())
        .collect();
    format!("a cycle of {} files: {}", names.len(), names.join(" "))
}

/// Each file's imports.
fn graph(files: &[&Source]) -> Graph {
    let modules: BTreeMap<&[String], usize> = files
        .iter()
        .enumerate()
        .map(|(index, source)| (&*source.module, index))
        .collect();
    let exports: Vec<Vec<(String, Vec<String>)>> =
        files.iter().map(|source| reexports(source)).collect();
    let mut graph = Graph::new();
    for (index, source) in files.iter().enumerate() {
        let mut walk = Walk::default();
        for item in &source.items {
            walk.visit_item(item);
        }
        let mut to = BTreeSet::new();
        for path in walk.paths {
            let target = resolve(&modules, &exports, &source.module, &path, 0);
            to.extend(target.filter(|target| *target != index));
        }
        graph.push(to);
    }
    graph
}

/// Re-exported names and their paths.
fn reexports(source: &Source) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for item in &source.items {
        if let Item::Use(item) = item {
            flatten(&item.tree, &mut Vec::new(), &mut found);
        }
    }
    found
}

/// Names of a `use`, with their paths.
fn flatten(tree: &UseTree, stem: &mut Vec<String>, found: &mut Vec<(String, Vec<String>)>) {
    let with = |stem: &[String], last: &syn::Ident| {
        let last = (*last != "self").then(|| last.to_string());
        stem.iter().cloned().chain(last).collect::<Vec<_>>()
    };
    match tree {
        UseTree::Path(path) => {
            stem.push(path.ident.to_string());
            flatten(&path.tree, stem, found);
            stem.pop();
        }
        UseTree::Name(name) => {
            let path = with(stem, &name.ident);
            found.push((path.last().cloned().unwrap_or_default(), path));
        }
        UseTree::Rename(rename) => {
            found.push((rename.rename.to_string(), with(stem, &rename.ident)));
        }
        UseTree::Glob(_) => found.push(("*".to_owned(), stem.clone())),
        UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, stem, found);
            }
        }
    }
}

/// The file that defines a path, if in this crate.
fn resolve(
    modules: &BTreeMap<&[String], usize>,
    exports: &[Vec<(String, Vec<String>)>],
    own: &[String],
    path: &[String],
    steps: usize,
) -> Option<usize> {
    let mut place = own.to_vec();
    let mut rest = path;
    match rest.first()?.as_str() {
        "crate" => {
            place.clear();
            rest = &rest[1..];
        }
        "self" => rest = &rest[1..],
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                place.pop()?;
                rest = &rest[1..];
            }
        }
        first => {
            // A child of this module, or another crate.
            place.push(first.to_owned());
            rest = &rest[1..];
            if !modules.contains_key(&*place) {
                return None;
            }
        }
    }
    while let Some(next) = rest.first() {
        place.push(next.clone());
        if !modules.contains_key(&*place) {
            place.pop();
            break;
        }
        rest = &rest[1..];
    }
    let file = *modules.get(&*place)?;
    let Some(name) = rest.first() else {
        return Some(file);
    };
    let again = exports[file].iter().find(|(export, _)| export == name);
    match again {
        Some((_, path)) if steps < MOST_STEPS => {
            let through = resolve(modules, exports, &place, path, steps + 1);
            through.or(Some(file))
        }
        _ => Some(file),
    }
}

#[derive(Default)]
struct Walk {
    paths: Vec<Vec<String>>,
}

impl<'ast> Visit<'ast> for Walk {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // A re-export is no use.
        if !matches!(item.vis, syn::Visibility::Inherited) {
            return;
        }
        let mut found = Vec::new();
        flatten(&item.tree, &mut Vec::new(), &mut found);
        self.paths.extend(found.into_iter().map(|(_, path)| path));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 && path.leading_colon.is_none() {
            let parts = path
                .segments
                .iter()
                .map(|segment| segment.ident.to_string());
            self.paths.push(parts.collect());
        }
        visit::visit_path(self, path);
    }
}

/// Strongly connected components of more than one file (Tarjan).
fn circles(graph: &Graph) -> Vec<Vec<usize>> {
    let mut search = Search {
        graph,
        seen: vec![None; graph.len()],
        low: vec![0; graph.len()],
        on_stack: vec![false; graph.len()],
        stack: Vec::new(),
        count: 0,
        found: Vec::new(),
    };
    for file in 0..graph.len() {
        if search.seen[file].is_none() {
            search.visit(file);
        }
    }
    search.found
}

struct Search<'a> {
    graph: &'a Graph,
    seen: Vec<Option<usize>>,
    low: Vec<usize>,
    on_stack: Vec<bool>,
    stack: Vec<usize>,
    count: usize,
    found: Vec<Vec<usize>>,
}

impl Search<'_> {
    fn visit(&mut self, file: usize) {
        let number = self.count;
        self.count += 1;
        self.seen[file] = Some(number);
        self.low[file] = number;
        self.stack.push(file);
        self.on_stack[file] = true;
        for &next in &self.graph[file] {
            match self.seen[next] {
                None => {
                    self.visit(next);
                    self.low[file] = self.low[file].min(self.low[next]);
                }
                Some(seen) if self.on_stack[next] => {
                    self.low[file] = self.low[file].min(seen);
                }
                Some(_) => {}
            }
        }
        if self.low[file] == number {
            let mut circle = Vec::new();
            while let Some(next) = self.stack.pop() {
                self.on_stack[next] = false;
                circle.push(next);
                if next == file {
                    break;
                }
            }
            if circle.len() > 1 {
                circle.sort_unstable();
                self.found.push(circle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::source;

    fn file(path: &str, text: &str) -> Source {
        let module = path.trim_end_matches(".rs").trim_end_matches("/mod");
        Source {
            package: "crate".to_owned(),
            path: path.into(),
            module: module.split('/').map(str::to_owned).collect(),
            items: source::parse(text).unwrap(),
        }
    }

    #[test]
    fn a_circle_over_folders_is_found_through_reexports() {
        let a = file("a/mod.rs", "mod inner; pub use inner::A;");
        let inner = file("a/inner.rs", "use crate::b::B; pub struct A;");
        let circle = file("b/mod.rs", "use crate::a::A; pub struct B;");
        let found = check(&[a, inner, circle]);
        assert_eq!(found, ["a cycle of 2 files: a/inner.rs b/mod.rs"]);
    }

    #[test]
    fn a_folder_and_its_parent_may_import_from_each_other() {
        let parent = file("a/mod.rs", "mod b; use b::B; pub struct A;");
        let child = file(
            "a/b/mod.rs",
            "use super::A; #[cfg(test)] use crate::c::C; pub struct B;",
        );
        let other = file("c/mod.rs", "use crate::a::A; pub struct C;");
        assert_eq!(check(&[parent, child, other]), Vec::<String>::new());
    }
}
